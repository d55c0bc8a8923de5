"""Small files, small functions, a word of what each file is for, and underscores that mean what they say: measured."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1] / "colonnade"
SHARED = {"colonnade._lazy", "colonnade._launch"}
"""What the package itself, which is the folder of these, lets its parts use."""


class Facts(NamedTuple):
    """What is asked of a file, so that it is parsed once."""

    path: Path
    lines: int
    long_functions: list[str]
    docstring: str | None
    imports: list[str]


@cache
def facts() -> list[Facts]:
    return [_facts(path) for path in sorted(PACKAGE.rglob("*.py"))]


def _facts(path: Path) -> Facts:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    long_functions = [node.name for node in functions if (node.end_lineno or 0) - node.lineno + 1 > 60]
    return Facts(path, text.count("\n"), long_functions, ast.get_docstring(tree), _imports(tree))


def _imports(tree: ast.Module) -> list[str]:
    """The modules of ours that a file imports, by their full names."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return [name for name in names if name.startswith("colonnade.")]


def test_no_file_over_400_lines_and_no_function_over_60():
    assert not [(str(file.path), file.lines) for file in facts() if file.lines > 400]
    assert not [(str(file.path), file.long_functions) for file in facts() if file.long_functions]


def test_every_file_says_what_it_is_for():
    assert not [str(file.path) for file in facts() if file.docstring is None and file.path.name != "version.py"]


def test_no_underscored_module_is_imported_from_outside_its_folder():
    wrong = []
    for file in facts():
        home = ".".join(["colonnade", *file.path.relative_to(PACKAGE).parts[:-1]])
        for name in file.imports:
            parts = name.split(".")
            for at, part in enumerate(parts):
                module = PACKAGE.joinpath(*parts[1:at], f"{part}.py")
                private = part.startswith("_") and module.exists() and ".".join(parts[: at + 1]) not in SHARED
                if private and ".".join(parts[:at]) != home:
                    wrong.append(f"{file.path} imports {name}")
    assert not wrong

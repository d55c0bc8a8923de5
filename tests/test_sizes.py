"""Small files, small functions, a word of what each file is for, and underscores that mean what they say: measured."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "colonnade"
SHARED = {"colonnade._lazy", "colonnade._launch"}
"""What the package itself, which is the folder of these, lets its parts use."""


@pytest.fixture(scope="module")
def files() -> dict[Path, tuple[str, ast.Module]]:
    """Every file of the package: its text, and the same parsed."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
    return {path: (text, ast.parse(text)) for path, text in texts.items()}


def test_no_file_over_400_lines_and_no_function_over_60(files):
    long_files = [str(path) for path, (text, _) in files.items() if text.count("\n") > 400]
    long_functions = [
        f"{path}: {node.name}"
        for path, (_, tree) in files.items()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and (node.end_lineno or 0) - node.lineno + 1 > 60
    ]
    assert not long_files + long_functions


def test_every_file_says_what_it_is_for(files):
    assert not [
        str(path) for path, (_, tree) in files.items() if path.name != "version.py" and ast.get_docstring(tree) is None
    ]


def imported(tree: ast.Module) -> list[str]:
    """The modules of ours that a file imports, by their full names."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return [name for name in names if name.startswith("colonnade.")]


def test_no_underscored_module_is_imported_from_outside_its_folder(files):
    wrong = []
    for path, (_, tree) in files.items():
        home = ".".join(["colonnade", *path.relative_to(PACKAGE).parts[:-1]])
        for name in imported(tree):
            parts = name.split(".")
            for at, part in enumerate(parts):
                module = PACKAGE.joinpath(*parts[1:at], f"{part}.py")
                private = part.startswith("_") and module.exists() and ".".join(parts[: at + 1]) not in SHARED
                if private and ".".join(parts[:at]) != home:
                    wrong.append(f"{path} imports {name}")
    assert not wrong

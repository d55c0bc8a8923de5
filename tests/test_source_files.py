"""Every source file has a module docstring and a name of its own, every class a name of its own; underscored modules stay inside their folder."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests import conftest

PACKAGE = Path(__file__).parents[1] / "colonnade"
SHARED = {"colonnade._imports", "colonnade._launch"}
"""What the package itself, which is the folder of these, lets its parts use."""


class Facts(NamedTuple):
    """The facts of one source file that the tests read; each file is parsed once."""

    path: Path
    docstring: str | None
    imports: list[str]
    classes: list[str]


@cache
def facts() -> list[Facts]:
    return [_facts(path) for path in sorted(PACKAGE.rglob("*.py"))]


def _facts(path: Path) -> Facts:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    classes = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return Facts(path, ast.get_docstring(tree), _imports(tree), classes)


def _imports(tree: ast.Module) -> list[str]:
    """The modules of ours that a file imports, by their full names."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return [name for name in names if name.startswith("colonnade.")]


def test_every_file_has_a_docstring():
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


def test_a_class_name_and_a_file_name_occur_once():
    """`compat` repeats the names of Colossal-AI on purpose."""
    own = [file for file in facts() if "compat" not in file.path.parts]
    files = Counter(file.path.name for file in own if file.path.name not in ("__init__.py", "__main__.py"))
    classes = Counter(name for file in own for name in file.classes)
    assert [name for name, count in (files + classes).items() if count > 1] == []


def test_the_lists_of_slow_and_long_tests_name_tests_that_exist():
    """A test that is moved or renamed would otherwise run in `make test` again, unnoticed."""
    folder = Path(__file__).parent
    for entry in (*conftest.SLOW_MODULES, *conftest.LONG, *conftest.ONE_WORKER):
        file, _, test = entry.partition("::")
        path = folder / file
        assert path.exists(), entry
        assert not test or f"def {test.partition('[')[0]}(" in path.read_text(encoding="utf-8"), entry

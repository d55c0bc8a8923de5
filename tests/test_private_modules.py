"""A module whose name begins with an underscore is its folder's own: nobody imports it from outside."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "colonnade"
SHARED = {"colonnade._lazy", "colonnade._launch"}
"""What the package itself, which is the folder of these, lets its parts use."""


def imported(path: Path) -> list[str]:
    """The modules of ours that a file imports, by their full names."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return [name for name in names if name.startswith("colonnade.")]


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_underscored_module_is_imported_from_outside_its_folder(path: Path) -> None:
    home = ".".join(["colonnade", *path.relative_to(ROOT).parts[:-1]])
    for name in imported(path):
        parts = name.split(".")
        for at, part in enumerate(parts):
            module = ROOT.joinpath(*parts[1:at], f"{part}.py")
            if part.startswith("_") and module.exists() and ".".join(parts[: at + 1]) not in SHARED:
                assert ".".join(parts[:at]) == home, f"{path.name} imports {name}"

"""Small files, small functions: measured."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "colonnade"
FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_file_over_400_lines_and_no_function_over_60(path):
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert (node.end_lineno or 0) - node.lineno + 1 <= 60, node.name


def test_every_file_says_what_it_is_for():
    silent = [
        str(path)
        for path in FILES
        if path.name != "version.py" and ast.get_docstring(ast.parse(path.read_text())) is None
    ]
    assert silent == []

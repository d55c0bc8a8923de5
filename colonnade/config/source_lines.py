"""On which line of a config file a key is set: for `.py` from its syntax tree, for `.toml` by its heads."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from colonnade.config.problems import KeyPath

Lines = dict[KeyPath, int]

_PART = r"""(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')"""
_DOTTED = rf"{_PART}(?:\s*\.\s*{_PART})*"
_TABLE = re.compile(rf"\s*(\[\[?)\s*({_DOTTED})\s*\]")
_ENTRY = re.compile(rf"\s*({_DOTTED})\s*=")


def python_lines(text: str) -> Lines:
    """Return the line of every key that Python source sets, nested keys in literal dicts and lists included.

    Where a key is set more than once, the last one counts.
    """
    lines: Lines = {}
    for statement in _statements(ast.parse(text)):
        for path, line, value in _settings(statement):
            for old in [known for known in lines if known[: len(path)] == path]:
                del lines[old]
            lines[path] = line
            lines.update(_nested(path, value))
    return lines


def toml_lines(text: str) -> Lines:
    """Return the line of every table and key; entries of inline tables are on the line of their key."""
    lines: Lines = {}
    counts: dict[KeyPath, int] = {}
    table: KeyPath = ()
    in_string = False
    for number, row in enumerate(text.splitlines(), 1):
        if not in_string and (head := _TABLE.match(row)):
            table = _parts(head[2])
            if head[1] == "[[":
                counts[table] = counts.get(table, -1) + 1
                table = (*table, counts[table])
            lines[table] = number
        elif not in_string and (entry := _ENTRY.match(row)):
            path = (*table, *_parts(entry[1]))
            lines[path] = number
        in_string ^= (row.count('"""') + row.count("'''")) % 2 == 1
    return lines


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Every statement that runs when the file runs: not those of functions and classes."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        if isinstance(child, ast.stmt):
            yield child
        yield from _statements(child)


def _settings(statement: ast.stmt) -> Iterator[tuple[KeyPath, int, ast.expr | None]]:
    """The keys one statement sets, each with its line and the expression it is set to, where there is one."""
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        for alias in statement.names:
            yield (alias.asname or alias.name,), statement.lineno, None
        return
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    if isinstance(statement, (ast.AnnAssign, ast.AugAssign)):
        targets = [statement.target]
    for target in targets:
        inner = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
        for name in inner:
            path = _target(name)
            if path is not None:
                value = getattr(statement, "value", None) if name is target else None
                yield path, statement.lineno, value


def _target(node: ast.expr) -> KeyPath | None:
    """The path of `name` or `name["key"]["key"]`; None for any other target."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        outer = _target(node.value)
        return None if outer is None else (*outer, node.slice.value)
    return None


def _nested(path: KeyPath, value: ast.expr | None) -> Lines:
    """The lines of what a literal holds: `dict(a=...)`, `{"a": ...}`, `[...]`, `(...)`."""
    found: list[tuple[object, int, ast.expr]] = []
    if isinstance(value, ast.Call):
        found = [(item.arg, item.lineno, item.value) for item in value.keywords if item.arg is not None]
    elif isinstance(value, ast.Dict):
        found = [
            (key.value, key.lineno, item)
            for key, item in zip(value.keys, value.values, strict=True)
            if isinstance(key, ast.Constant)
        ]
    elif isinstance(value, (ast.List, ast.Tuple)):
        found = [(index, item.lineno, item) for index, item in enumerate(value.elts)]
    lines: Lines = {}
    for key, line, item in found:
        inner = (*path, key)
        lines[inner] = line
        lines.update(_nested(inner, item))
    return lines


def _parts(dotted: str) -> KeyPath:
    return tuple(part.strip("\"'") for part in re.findall(_PART, dotted))

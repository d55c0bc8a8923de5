"""Docstrings are plain text with `code` in single backticks and `Example::` blocks; Sphinx wants reStructuredText."""

from __future__ import annotations

import inspect
import re
from typing import Any

_CODE = re.compile(r"(`+)(.+?)\1", re.DOTALL)
EXAMPLE = re.compile(r"^( *)[A-Z][a-z ]+::\n(?:\n|\1 +.*(?:\n|$))+", re.MULTILINE)
"""A line such as `Example::` and the indented code below it, which stays as it is."""
_SPECIAL = re.compile(r"([*|\\])|(?<=\w)_(?=\W|$)")


def as_restructured_text(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Make code of what is in backticks, and plain text of everything else but examples."""
    text, made, at = "\n".join(lines), [], 0
    for example in EXAMPLE.finditer(text):
        made += [_prose(text[at : example.start()]), example[0]]
        at = example.end()
    lines[:] = "".join([*made, _prose(text[at:])]).split("\n")


def is_left_out(app: Any, what: str, name: str, thing: Any, skip: bool, options: Any) -> bool | None:
    """Leave out members of torch and Python, and methods whose docstring is that of their base class."""
    module = getattr(thing, "__module__", None) or ""
    inherited = inspect.isfunction(thing) and thing.__doc__ is None
    return True if inherited or module.startswith(("torch.", "builtins", "enum")) else None


def _prose(text: str) -> str:
    made, at = [], 0
    for found in _CODE.finditer(text):
        made += [_escaped(text[at : found.start()]), f"``{' '.join(found[2].split())}``"]
        if text[found.end() : found.end() + 1].isalnum():
            made.append(r"\ ")
        at = found.end()
    return "".join([*made, _escaped(text[at:])])


def _escaped(text: str) -> str:
    return _SPECIAL.sub(lambda found: f"\\{found[0]}", text)

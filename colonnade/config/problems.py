"""Problems found in a config, and the one form in which all of them are told at once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from colonnade.errors import ConfigError

KeyPath = tuple[Any, ...]
"""Where a value lies: keys of dicts and indices of lists, from the outside in."""

UNSAID: Any = object()
"""The value of a problem that is not about one value."""

_LONGEST = 60


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: where, what to do about it, and the value that was met."""

    path: KeyPath
    text: str
    value: Any = UNSAID


@dataclass(frozen=True)
class Source:
    """Where a config came from: its name in the head line, its short name, and its text."""

    name: str = "the config"
    file: str = ""
    text: str = ""

    def where(self, path: KeyPath) -> str:
        """Return `file:line` of the first line with the key at `path`, or with the nearest one around it.

        A top-level key begins its line, `.py` or `.toml`; a nested one comes after the key it lies in. What a
        list holds has the line of the list; a key that came by an import has none.
        """
        position = -1
        for depth, key in enumerate(path):
            name = re.escape(str(key))
            form = rf"""\b{name}["']?\s*[]=:.]""" if depth else rf"""^(?:\[+ *)?["']?{name}\b"""
            found = re.compile(form, re.MULTILINE).search(self.text, position + 1)
            if found is None or isinstance(key, int):
                break
            position = found.start()
        return self.file if position < 0 else f"{self.file}:{self.text.count(chr(10), 0, position) + 1}"


def config_error(problems: Sequence[Problem], source: Source) -> ConfigError:
    """Return one error that tells every problem, each with its place in the source."""
    rows = [(source.where(_present(problem)), _told(problem)) for problem in problems]
    width = max(len(where) for where, _ in rows)
    lines = [f"  {where:<{width}}  {text}" if width else f"  {text}" for where, text in rows]
    return ConfigError("\n".join([_head(len(rows), source.name), *lines]), code="C001")


def file_error(name: str, file: str, text: str, *, line: int | None = None, shown: str = "") -> ConfigError:
    """Return the error of a file that could not be read; `shown` is source text to print below."""
    where = file if line is None else f"{file}:{line}"
    below = [f"      {row}" for row in shown.splitlines()]
    # The code stands behind what is said, not behind the source.
    error = ConfigError("\n".join([_head(1, name), f"  {where}  {text} [C002]", *below]))
    error.code = "C002"
    return error


def dotted(path: KeyPath) -> str:
    """Return a path as one writes it: `gradient_handler[0].type`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part or repr(part)}"
    return text.removeprefix(".")


def _head(count: int, name: str) -> str:
    return f"colonnade: {count} problem{'' if count == 1 else 's'} in {name}"


def _present(problem: Problem) -> KeyPath:
    """The path of what is there: a nested problem without a value is about a key that is missing."""
    return problem.path[:-1] if problem.value is UNSAID and len(problem.path) > 1 else problem.path


def _told(problem: Problem) -> str:
    value = "" if problem.value is UNSAID else f" = {shortened(problem.value)}"
    return f"{dotted(problem.path)}{value}   {problem.text}"


def shortened(value: object) -> str:
    """Return `value` as one line of limited length, for a message."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a value of the user's own, or an int of thousands of digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."

"""Problems found in a config, and the one form in which all of them are told at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from colonnade.config.text import shortened
from colonnade.errors import ConfigError

KeyPath = tuple[Any, ...]
"""Where a value lies: keys of dicts and indices of lists, from the outside in."""

UNSAID: Any = object()
"""The value of a problem that is not about one value."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: where, what to do about it, and the value that was met."""

    path: KeyPath
    text: str
    value: Any = UNSAID


@dataclass(frozen=True)
class Source:
    """Where a config came from: its name in the head line, its short name, and the lines of its keys."""

    name: str = "the config"
    file: str | None = None
    lines: Mapping[KeyPath, int] = field(default_factory=dict)

    def where(self, path: KeyPath) -> str:
        """Return `file:line` of `path` or of the nearest value around it, or as much of that as is known."""
        if self.file is None:
            return ""
        around = [path[:length] for length in range(len(path), 0, -1)]
        line = next((self.lines[outer] for outer in around if outer in self.lines), None)
        return self.file if line is None else f"{self.file}:{line}"


def config_error(problems: Sequence[Problem], source: Source) -> ConfigError:
    """Return one error that tells every problem, each with its place in the source."""
    rows = [(source.where(problem.path), _told(problem)) for problem in problems]
    width = max(len(where) for where, _ in rows)
    lines = [f"  {where:<{width}}  {text}" if width else f"  {text}" for where, text in rows]
    return ConfigError("\n".join([_head(len(rows), source.name), *lines]))


def file_error(name: str, file: str, text: str, *, line: int | None = None, shown: str = "") -> ConfigError:
    """Return the error of a file that could not be read; `shown` is source text to print below."""
    where = file if line is None else f"{file}:{line}"
    below = [f"      {row}" for row in shown.splitlines()]
    return ConfigError("\n".join([_head(1, name), f"  {where}  {text}", *below]))


def dotted(path: KeyPath) -> str:
    """Return a path as one writes it: `gradient_handler[0].type`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def _head(count: int, name: str) -> str:
    return f"colonnade: {count} problem{'' if count == 1 else 's'} in {name}"


def _told(problem: Problem) -> str:
    value = "" if problem.value is UNSAID else f" = {shortened(problem.value)}"
    return f"{dotted(problem.path)}{value}   {problem.text}"

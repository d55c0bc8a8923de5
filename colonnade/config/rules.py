"""What a key may hold, as data, and the one walk that compares a value with it.

A `Rule` says what one value may be. A `Section` says what may stand in a dict: its keys, which of them
are required, and what becomes of others. `schema.py` is the table written in these terms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from colonnade.config.names import is_ordinary, near, nearest_name
from colonnade.config.problems import KeyPath, Problem
from colonnade.errors import listed


def nothing(value: object) -> bool:
    """Accept no plain value: the rule is for a dict or a list."""
    return False


@dataclass(frozen=True)
class Rule:
    """What one value may be: one that `accepts` takes, or a dict of `section`, or a list of `items`.

    `allows` completes the sentence "must be ...".
    """

    allows: str
    accepts: Callable[[Any], bool] = nothing
    section: Section | None = None
    items: Rule | None = None


@dataclass(frozen=True)
class Key:
    """A known key: what it may hold, and one line that says what it is for."""

    rule: Rule
    says: str


@dataclass(frozen=True)
class Section:
    """What may stand in a dict.

    Any other key is an error, unless the section is `is_open` (it holds somebody's keyword arguments; only
    what is nearly one of `keys` is refused) or `others` gives the rule of further keys. `renamed` maps words
    of other frameworks to a key; `refused` maps keys to the sentence that says what to do instead.
    """

    keys: Mapping[str, Key]
    required: tuple[str, ...] = ()
    is_open: bool = False
    others: Rule | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)


def check_value(rule: Rule, path: KeyPath, value: Any) -> Iterator[Problem]:
    """Yield every problem of `value`, which lies at `path`."""
    if isinstance(value, dict) and rule.section is not None:
        yield from _check_section(rule.section, path, value)
    elif isinstance(value, (list, tuple)) and rule.items is not None:
        for index, item in enumerate(value):
            yield from check_value(rule.items, (*path, index), item)
    elif not rule.accepts(value):
        yield Problem(path, f"must be {rule.allows}", value)


def _check_section(section: Section, path: KeyPath, values: dict[Any, Any]) -> Iterator[Problem]:
    meant: set[str | None] = set()
    for key, value in values.items():
        if key in section.keys:
            yield from check_value(section.keys[key].rule, (*path, key), value)
            continue
        close = _meant_key(section, key)
        meant.update(section.required if key in section.refused else [close])
        text = _why_unknown(section, key, value, close)
        if text is not None:
            yield Problem((*path, key), text, value)
        elif section.others is not None:
            yield from check_value(section.others, (*path, key), value)
    for key in section.required:
        if key not in values and key not in meant:
            yield Problem((*path, key), f"is missing; it must be {section.keys[key].rule.allows}")


def _meant_key(section: Section, key: object) -> str | None:
    """The known key that an unknown one stands for, or None when it is a key of its own."""
    if not isinstance(key, str):
        return None
    if key.lower() in section.renamed:
        return section.renamed[key.lower()]
    if not section.is_open and section.others is None:
        return nearest_name(key, section.keys)
    return None if is_ordinary(key, section.keys) else near(key, section.keys, limit=1)


def _why_unknown(section: Section, key: object, value: object, close: str | None) -> str | None:
    """Say what is wrong with a key that is not among the known ones; None when it may stay."""
    if not isinstance(key, str):
        return "is no key: a key is a string"
    if key in section.refused:
        return section.refused[key]
    if close is not None:
        return f"unknown key. Did you mean `{close}`?"
    if section.is_open:
        return None
    if section.others is None:
        return f"unknown key; allowed: {listed(section.keys)}"
    if not isinstance(value, dict):
        return f"unknown key; allowed: {listed(section.keys)}, or a further one as {section.others.allows}"
    return None

"""Dataclasses as JSON and back. Somebody may have changed the JSON: each value is taken only in its field's type."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from colonnade.errors import CheckpointError

Record = TypeVar("Record")

_LARGEST = 1 << 62
_KEYS = {"state_name": "slot"}
"""Where the key in JSON is not the name of the field."""


class Damaged(CheckpointError):
    """A checkpoint whose bytes are not those that were written; an older one may still be good."""


def to_json(record: Any) -> dict[str, Any]:
    """A dataclass, and those in it, as JSON objects. Lists of plain values are taken as they are, however long."""
    return {_KEYS.get(field.name, field.name): _plain(getattr(record, field.name)) for field in fields(record)}


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return to_json(value)
    if isinstance(value, (tuple, list)) and not _PLAIN.keys() >= set(map(type, value)):
        return [_plain(entry) for entry in value]
    return value


def from_json(kind: type[Record], content: Any, where: str) -> Record:
    """The dataclass that `to_json` was given; raises Damaged, with the place, for a value of another type."""
    if not isinstance(content, dict):
        raise Damaged(f"{where} is a {type(content).__name__}, not an object")
    values = {}
    for name, expected in _fields(kind):  # type: ignore[arg-type]
        key = _KEYS.get(name, name)
        values[name] = _value(expected, content.get(key), f"{where}: {key}")
    return kind(**values)


@cache
def _fields(kind: type[Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(get_type_hints(kind).items())


def _value(expected: Any, value: Any, where: str) -> Any:
    if expected is Any:
        return value
    if expected in _PLAIN:
        fits, what, _ = _PLAIN[expected]
        return expected(value) if fits(value) else _refuse(value, where, what)
    origin, inner = get_origin(expected), get_args(expected)
    if origin is UnionType:  # something or None
        return None if value is None else _value(inner[0], value, where)
    if origin in (tuple, list):
        fixed = origin is tuple and inner[-1] is not ...
        return origin(_fixed(inner, value, where) if fixed else _entries(inner[0], value, where))
    return from_json(expected, value, where)


def _entries(expected: Any, value: Any, where: str) -> list[Any]:
    fits, _, what = _PLAIN.get(expected, (None, "", "a list"))
    if not isinstance(value, list):
        _refuse(value, where, what)
    if fits is None:
        return _fixed([expected] * len(value), value, where)
    # Lists may be long: the types of all, and of numbers the smallest and the largest, say as much as each of them.
    few = [min(value), max(value)] if set(map(type, value)) == {int} else value
    if not all(map(fits, few)):
        _refuse(value, where, what)
    return value


def _fixed(kinds: Sequence[Any], value: Any, where: str) -> list[Any]:
    pairs = enumerate(zip(kinds, value, strict=True))
    return [_value(expected, entry, f"{where}[{at}]") for at, (expected, entry) in pairs]


def _refuse(value: Any, where: str, expected: str) -> Any:
    raise Damaged(f"{where} is {str(value)[:80]!r}, not {expected}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST


_PLAIN: dict[Any, tuple[Callable[[Any], bool], str, str]] = {
    str: (lambda value: isinstance(value, str), "a text", "a list of texts"),
    int: (_is_size, "a whole number from 0 on", "a list of whole numbers from 0 on"),
    float: (_is_number, "a number", "a list of numbers"),
}
"""What is taken for a type, and what a value, or a list of them, is called."""

"""Config values as Python text: the form in which a config is printed back and shown in messages.

The text is what one would write in a config file. Executed, it gives the same values; a value that has no
literal form (a function, an open file) appears as its `repr`.
"""

from __future__ import annotations

import enum
import keyword
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

WIDTH = 100
# Names that the text itself calls. A user's key of the same name must not be bound before the last line.
_NEEDED = frozenset({"dict", "set", "frozenset", "float", "complex", "globals", "range"})


class _Container(NamedTuple):
    """A bracketed value: its brackets, and each item with the text in front of it."""

    opening: str
    items: list[tuple[str, Any]]
    closing: str


def source(values: Mapping[str, Any]) -> str:
    """Return the text of a `.py` config file that holds `values`.

    Keys that cannot be written as a name come last, in one `globals().update(...)`.
    """
    named = {key: value for key, value in values.items() if _is_name(key) and key not in _NEEDED}
    lines = [f"{key} = {_block(value, 0, len(key) + 3)}" for key, value in named.items()]
    rest = {key: value for key, value in values.items() if key not in named}
    if rest:
        pairs = _Container("{", [(f"{expression(key)}: ", value) for key, value in rest.items()], "}")
        lines.append(f"globals().update({_one_line(pairs)})")
    return "\n".join(lines)


def call(name: str, values: Mapping[str, Any]) -> str:
    """Return `name(key=value, ...)` on one line, or `name({...})` where a key is no name."""
    if all(_is_name(key) for key in values):
        return _one_line(_Container(f"{name}(", [(f"{key}=", value) for key, value in values.items()], ")"))
    return f"{name}({expression(dict(values))})"


def expression(value: Any) -> str:
    """Return `value` as one line of Python."""
    container = _container(value)
    return _scalar(value) if container is None else _one_line(container, lone_comma=type(value) is tuple)


def shortened(value: Any, limit: int = 60) -> str:
    """Return `value` as one line of at most `limit` characters, for a message."""
    text = " ".join(expression(value).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _block(value: Any, indent: int, used: int) -> str:
    """`value` on one line where it fits after `used` characters, else one item per line."""
    line = expression(value)
    container = _container(value)
    if container is None or not container.items or used + len(line) <= WIDTH:
        return line
    inner = indent + 4
    rows = [
        f"{' ' * inner}{prefix}{_block(item, inner, inner + len(prefix) + 1)},\n" for prefix, item in container.items
    ]
    return f"{container.opening}\n{''.join(rows)}{' ' * indent}{container.closing}"


def _one_line(container: _Container, lone_comma: bool = False) -> str:
    inside = ", ".join(prefix + expression(item) for prefix, item in container.items)
    comma = "," if lone_comma and len(container.items) == 1 else ""
    return f"{container.opening}{inside}{comma}{container.closing}"


def _container(value: Any) -> _Container | None:
    """Take a dict, list, tuple or set apart; None for anything else, subclasses of tuple and set included."""
    if isinstance(value, dict):
        if all(_is_name(key) for key in value):
            return _Container("dict(", [(f"{key}=", item) for key, item in value.items()], ")")
        return _Container("{", [(f"{expression(key)}: ", item) for key, item in value.items()], "}")
    if isinstance(value, list):
        return _Container("[", [("", item) for item in value], "]")
    if type(value) is tuple:
        return _Container("(", [("", item) for item in value], ")")
    if type(value) in (set, frozenset):
        items = [("", item) for item in sorted(value, key=repr)]
        if type(value) is frozenset:
            return _Container("frozenset({", items, "})") if items else _Container("frozenset(", [], ")")
        return _Container("{", items, "}") if items else _Container("set(", [], ")")
    return None


def _scalar(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return str(value) if value.name is None else f"{type(value).__name__}.{value.name}"
    if isinstance(value, float):
        return float.__repr__(value) if math.isfinite(value) else f"float('{float(value)}')"
    if isinstance(value, complex):
        return f"complex({_scalar(value.real)}, {_scalar(value.imag)})"
    return repr(value)


def _is_name(key: object) -> bool:
    """Whether `key` can stand left of `=`. ASCII only: Python rewrites some letters as it reads."""
    return (
        isinstance(key, str)
        and key.isascii()
        and key.isidentifier()
        and not keyword.iskeyword(key)
        and key != "__debug__"
    )

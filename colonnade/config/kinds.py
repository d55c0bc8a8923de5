"""Kinds of values that keys hold: small rules, and how to join them."""

from __future__ import annotations

import enum
import numbers
from typing import Any

from colonnade.config.rules import Rule, Section


def any_of(*rules: Rule) -> Rule:
    """A value that one of the rules takes; the message lists them all. Dicts: see `with_dict`."""
    told = [rule.allows for rule in rules]
    return Rule(f"{', '.join(told[:-1])} or {told[-1]}", lambda value: any(rule.accepts(value) for rule in rules))


def with_dict(rule: Rule, section: Section, told: str | None = None) -> Rule:
    """What `rule` takes, or a dict of `section`; `told` is how the message writes that dict."""
    form = told or f"a dict of {', '.join(section.keys)}"
    return Rule(f"{rule.allows}, or {form}", rule.accepts, section)


def only_dict(section: Section, told: str | None = None) -> Rule:
    """A dict of `section` and nothing else."""
    return Rule(told or f"a dict of {', '.join(section.keys)}", section=section)


def choice(*values: Any) -> Rule:
    """One of these values; 1 and True are different."""
    return Rule(
        ", ".join(map(repr, values[:-1])) + (" or " if values[1:] else "") + repr(values[-1]),
        lambda value: any(type(value) is type(allowed) and value == allowed for allowed in values),
    )


def int_from(low: int) -> Rule:
    """An int of at least `low`; a bool is none."""
    return Rule(f"an int >= {low}", lambda value: _is_int(value) and value >= low)


def number_above(low: float) -> Rule:
    """A number greater than `low`; nan and bools are none."""
    return Rule(f"a number > {low:g}", lambda value: _is_number(value) and value > low)


def number_from(low: float) -> Rule:
    """A number of at least `low`; nan and bools are none."""
    return Rule(f"a number >= {low:g}", lambda value: _is_number(value) and value >= low)


def _is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_texts(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value)


def _is_shape(value: Any) -> bool:
    if not isinstance(value, (list, tuple)) or not value:
        return False
    return all(_is_shape(item) if isinstance(item, (list, tuple)) else COUNT.accepts(item) for item in value)


def _is_level(value: Any) -> bool:
    names = ("debug", "info", "warning", "warn", "error", "critical")
    return value.lower() in names if isinstance(value, str) else _is_int(value) and value >= 0


ANYTHING = Rule("anything", lambda value: True)
NONE = Rule("None", lambda value: value is None)
BOOL = Rule("True or False", lambda value: isinstance(value, bool))
INT = Rule("an int", _is_int)
COUNT = int_from(1)
POSITIVE = number_above(0)
FRACTION = Rule("a number between 0 and 1", lambda value: _is_number(value) and 0 < value < 1)
TEXT = Rule("a string", lambda value: isinstance(value, str))
TEXTS = Rule("a list of strings", _is_texts)
FUNCTION = Rule("a function", callable)
MEMBER = Rule("a member of an Enum", lambda value: isinstance(value, enum.Enum))
COLLECTION = Rule("a list or dict", lambda value: isinstance(value, (list, tuple, dict)))
# Known by the name of its type: configs are read where torch is not imported.
DTYPE = Rule("a dtype", lambda value: type(value).__name__ == "dtype")
SHAPE = Rule("a list or tuple of ints >= 1", _is_shape)
LEVEL = Rule("a level (debug, info, warning, error, critical, or a number)", _is_level)

"""What a key may hold, as data, and the one walk that compares a value with it.

A `Rule` says what one value may be. A `Section` says what may stand in a dict: its keys, which of them
are required, and what becomes of others. Below stand the kinds of values. `schema.py` is the table in these terms.
"""

from __future__ import annotations

import enum
import math
import numbers
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from colonnade.config.problems import KeyPath, Problem, is_ordinary, near
from colonnade.errors import listed, nearest

NO_KEY = "is no key: a key is a non-empty string"
_LARGEST = 2**63 - 1  # what torch's own integers hold


def nothing(value: object) -> bool:
    """Accept no plain value: the rule is for a dict or a list."""
    return False


@dataclass(frozen=True)
class Rule:
    """What one value may be: one that `accepts` takes, or a dict of `section`, or a list of `items`.

    `allows` completes the sentence "must be ...". `may_differ`: ranks may have other values; all else is compared at
    launch. `purpose` says what the key is for, in the list of all keys.
    """

    allows: str
    accepts: Callable[[Any], bool] = nothing
    section: Section | None = None
    items: Rule | None = None
    may_differ: bool = False
    purpose: str = ""

    def means(self, purpose: str) -> Rule:
        """The same rule, as that of a key which is for this."""
        return replace(self, purpose=purpose)


@dataclass(frozen=True)
class Section:
    """What may stand in a dict.

    Any other key is an error, unless the section is `is_open` (it holds somebody's keyword arguments; only
    what is nearly one of `keys` is refused) or `others` gives the rule of further keys. `renamed` maps words
    of other frameworks to a key; `refused` maps keys to the sentence that says what to do instead.
    """

    keys: Mapping[str, Rule]
    required: tuple[str, ...] = ()
    is_open: bool = False
    others: Rule | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)


def check_value(rule: Rule, path: KeyPath, value: Any) -> Iterator[Problem]:
    """Yield every problem of `value`, which lies at `path`."""
    if _is_int(value) and abs(value) > _LARGEST:
        yield Problem(path, "is too large: no number of a config is above 2**63 - 1", value)
    elif isinstance(value, dict) and rule.section is not None:
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
            yield from check_value(section.keys[key], (*path, key), value)
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
            yield Problem((*path, key), f"is missing; it must be {section.keys[key].allows}")


def _meant_key(section: Section, key: object) -> str | None:
    """The known key that an unknown one stands for, or None when it is a key of its own."""
    if not isinstance(key, str) or not key:
        return None
    if key.lower() in section.renamed:
        return section.renamed[key.lower()]
    if not section.is_open and section.others is None:
        return nearest(key, section.keys)
    return None if is_ordinary(key, section.keys) else near(key, section.keys)


def _why_unknown(section: Section, key: object, value: object, close: str | None) -> str | None:
    """Say what is wrong with a key that is not among the known ones; None when it may stay."""
    if not isinstance(key, str) or not key:
        return NO_KEY
    if key in section.refused:
        return section.refused[key]
    if close is not None:
        return f"unknown key. Did you mean `{close}`?"
    if section.is_open:
        return None
    if section.others is None:
        return f"unknown key; allowed: {listed(section.keys)}"
    if section.keys and not isinstance(value, dict):
        return f"unknown key; allowed: {listed(section.keys)}, or a further one as {section.others.allows}"
    return None


def differing(rule: Rule) -> Rule:
    """The same rule, for a key whose value may differ between ranks."""
    return replace(rule, may_differ=True)


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


def int_within(low: int, high: int) -> Rule:
    """An int from `low` to `high`; a bool is none."""
    return Rule(f"an int from {low} to {high}", lambda value: _is_int(value) and low <= value <= high)


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


ANYTHING = Rule("anything", lambda value: True)
NONE = Rule("None", lambda value: value is None)
BOOL = Rule("True or False", lambda value: isinstance(value, bool))
INT = Rule("an int", _is_int)
COUNT = int_from(1)
POSITIVE = number_above(0)
FRACTION = Rule("a number between 0 and 1", lambda value: _is_number(value) and 0 < value < 1)
TEXT = Rule("a non-empty string", lambda value: isinstance(value, str) and value != "")
TEXTS = Rule("a list of strings", _is_texts)
SOME_TEXTS = Rule("a non-empty list of strings", lambda value: _is_texts(value) and len(value) > 0)
LOSS_SCALE = Rule("a number from 2**-126 to 2**127", lambda value: _is_number(value) and 2**-126 <= value <= 2**127)
# The order of a norm: sums of higher powers of small gradients leave the range of fp64.
ORDER = Rule(
    "a number > 0 and <= 32, or inf or 'inf'",
    lambda value: value == "inf" or (_is_number(value) and (0 < value <= 32 or value == math.inf)),
)
# These two are known by the names of their types: configs are read where torch is not imported.
AMP_MODE = Rule(
    "a member of AMP_TYPE", lambda value: isinstance(value, enum.Enum) and type(value).__name__ == "AMP_TYPE"
)
DTYPE = Rule("a torch dtype", lambda value: f"{type(value).__module__}.{type(value).__name__}" == "torch.dtype")
SHAPE = Rule("a list or tuple of ints >= 1", _is_shape)

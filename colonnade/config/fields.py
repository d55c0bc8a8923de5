"""What a key of a config may hold, and the two walks over a section: the check of a config, and the reading of a section.

A `Rule` says what one value may be; the kinds of values stand below. A section is a frozen dataclass whose fields are
`key(...)`: type, default, rule and purpose of a key in one line. `check_value` compares a config with the rules and yields
problems; `read` of a section makes the object that the code reads. `settings.py` is the table of all sections in these terms.

No torch here: a config is checked before torch is imported.
"""

from __future__ import annotations

import enum
import math
import numbers
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self, cast

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
    section: type[AnySection] | None = None
    items: Rule | None = None
    may_differ: bool = False
    purpose: str = ""


# --- Sections ---


def key(
    default: Any,
    rule: Rule,
    purpose: str,
    *,
    read: Callable[[Any], Any] | None = None,
    may_differ: bool = False,
    compare: bool = True,
) -> Any:
    """A field of a section: its default (of a class: what a call of it gives), what it may be, and what it is for.

    `read` makes the value of the field from the value in a config, where they are not the same. `may_differ`: ranks may
    have other values. `compare=False` leaves the field out of `==`.
    """
    about = {"rule": replace(rule, purpose=purpose, may_differ=may_differ), "read": read}
    if isinstance(default, type):
        return field(default_factory=default, metadata=about, compare=compare)
    return field(default=default, metadata=about, compare=compare)


class AnySection:
    """Base of the frozen dataclasses that say what may stand in a dict of a config, and are what is read from it.

    Arguments of a subclass: `required` keys; `short`, the key that a plain value in place of the dict stands for
    (`zero = 2`); `renamed`, words of other frameworks by key; `refused`, keys with the sentence that says what to do
    instead; `further`, the name of the field that takes keys which are not ours (somebody's keyword arguments: only what is
    nearly one of our keys is refused); `others`, the rule of such keys. Without `further` and `others` they are errors.
    Fields that are not made by `key` are not read from a config.
    """

    required: ClassVar[tuple[str, ...]] = ()
    short: ClassVar[str | None] = None
    renamed: ClassVar[Mapping[str, str]] = {}
    refused: ClassVar[Mapping[str, str]] = {}
    further: ClassVar[str | None] = None
    others: ClassVar[Rule | None] = None

    def __init_subclass__(
        cls,
        *,
        required: tuple[str, ...] = (),
        short: str | None = None,
        renamed: Mapping[str, str] | None = None,
        refused: Mapping[str, str] | None = None,
        further: str | None = None,
        others: Rule | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init_subclass__(**kwargs)
        cls.required, cls.short, cls.further, cls.others = required, short, further, others
        cls.renamed = {word: name for name, words in (renamed or {}).items() for word in words.split()}
        cls.refused = refused or {}

    @classmethod
    def conflicts(cls, given: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
        """(key, what is wrong, value) for values of a dict that are right one by one and wrong together.

        Asked of what stands in the config, which may have other problems too: all are told in one error.
        """
        return iter(())

    @classmethod
    def build(cls, given: Any) -> Self:
        """From what stands in a config: nothing, the plain value that `short` is for, or a dict. It was checked before.

        None stands for "not set".
        """
        rules = keys_of(cls)
        readers = {each.name: each.metadata["read"] for each in fields(cast(Any, cls)) if each.name in rules}
        spelled = cls.spelled_out(given)
        values = {name: value for name, value in spelled.items() if name in rules and value is not None}
        values = {name: readers[name](value) if readers[name] else value for name, value in values.items()}
        if cls.further is not None:
            values[cls.further] = {name: value for name, value in spelled.items() if name not in rules}
        made = cls(**cls.completed(values))
        made.refuse(values)
        return made

    @classmethod
    def spelled_out(cls, given: Any) -> Mapping[str, Any]:
        """The dict that a value in a config stands for."""
        if given is None:
            return {}
        return given if isinstance(given, Mapping) or cls.short is None else {cls.short: given}

    @classmethod
    def completed(cls, values: dict[str, Any]) -> dict[str, Any]:
        """The values of all fields from those that are given: defaults that depend on other keys."""
        return values

    def refuse(self, given: Mapping[str, Any]) -> None:
        """Raise for values that are wrong together and are met first when the section is read; `given` are those set."""


class Section(AnySection):
    """A section that always means something: all defaults where its key is not set."""

    @classmethod
    def read(cls, given: Any) -> Self:
        """From what stands in a config: nothing, the plain value that `short` is for, or a dict."""
        return cls.build(given)


class SwitchedSection(AnySection):
    """A section that is off where its key is not set, False or empty, and on with all defaults where it is True."""

    @classmethod
    def read(cls, given: Any) -> Self | None:
        """From a bool, the plain value that `short` is for, or a dict; None where it is off."""
        return cls.build(None if given is True else given) if given else None


_keys: dict[type, dict[str, Rule]] = {}


def keys_of(section: type[AnySection]) -> dict[str, Rule]:
    """The keys of a section, in the order of its fields: one dict for each section."""
    if section not in _keys:
        given = cast(Any, section)
        _keys[section] = {each.name: each.metadata["rule"] for each in fields(given) if "rule" in each.metadata}
    return _keys[section]


# --- The check ---


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


def _check_section(section: type[AnySection], path: KeyPath, values: dict[Any, Any]) -> Iterator[Problem]:
    known = keys_of(section)
    # A required key that stands under a nearly right name is not reported as missing besides.
    meant: set[str | None] = set()
    for name, value in values.items():
        if name in known:
            yield from check_value(known[name], (*path, name), value)
            continue
        close = _meant_key(section, name)
        meant.update(section.required if name in section.refused else [close])
        text = _why_unknown(section, name, value, close)
        if text is not None:
            yield Problem((*path, name), text, value)
        elif section.others is not None:
            yield from check_value(section.others, (*path, name), value)
    for name in section.required:
        if name not in values and name not in meant:
            yield Problem((*path, name), f"is missing; it must be {known[name].allows}")


def _meant_key(section: type[AnySection], name: object) -> str | None:
    """The known key that an unknown one stands for, or None when it is a key of its own."""
    if not isinstance(name, str) or not name:
        return None
    if name.lower() in section.renamed:
        return section.renamed[name.lower()]
    known = keys_of(section)
    if section.further is None and section.others is None:
        return nearest(name, known)
    # Where further keys are allowed, only what is one edit away is taken for a typo.
    return None if is_ordinary(name, known) else near(name, known)


def _why_unknown(section: type[AnySection], name: object, value: object, close: str | None) -> str | None:
    """Say what is wrong with a key that is not among the known ones; None when it may stay."""
    if not isinstance(name, str) or not name:
        return NO_KEY
    if name in section.refused:
        return section.refused[name]
    if close is not None:
        return f"unknown key. Did you mean `{close}`?"
    if section.others is None:
        return None if section.further is not None else f"unknown key; allowed: {listed(keys_of(section))}"
    if keys_of(section) and not isinstance(value, dict):
        return f"unknown key; allowed: {listed(keys_of(section))}, or a further one as {section.others.allows}"
    return None


# --- Kinds of values ---


def any_of(*rules: Rule) -> Rule:
    """A value that one of the rules takes; the message lists them all. Dicts: see `with_dict`."""
    told = [rule.allows for rule in rules]
    return Rule(f"{', '.join(told[:-1])} or {told[-1]}", lambda value: any(rule.accepts(value) for rule in rules))


def with_dict(rule: Rule, section: type[AnySection], told: str | None = None) -> Rule:
    """What `rule` takes, or a dict of `section`; `told` is how the message writes that dict."""
    form = told or f"a dict of {', '.join(keys_of(section))}"
    return Rule(f"{rule.allows}, or {form}", rule.accepts, section)


def only_dict(section: type[AnySection], told: str | None = None) -> Rule:
    """A dict of `section` and nothing else."""
    return Rule(told or f"a dict of {', '.join(keys_of(section))}", section=section)


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

"""The building blocks of the config schema: rules for values, sections of keys, and the check of a config.

A `Rule` defines the allowed values of a key; rules for common kinds of values are at the end of this file. A section is a frozen
dataclass whose fields are `key(...)`: type, default, rule and purpose of a key in one line. `check_value` compares a config with
the rules and yields problems; the classmethod `read` of a section returns the settings object that the library uses.
`settings.py` defines all sections.

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

NO_KEY = "is no valid key: a key is a non-empty string"
_LARGEST = 2**63 - 1  # the largest int64 of torch


def nothing(value: object) -> bool:
    """Return False. The `accepts` function of rules that allow only a dict or list."""
    return False


@dataclass(frozen=True)
class Rule:
    """The allowed values of a key: values for which `accepts` returns True, a dict of `section`, or a list of `items`.

    Attributes:
        allows: completes the sentence "must be ...".
        may_differ: whether ranks may have different values; all other values are compared at launch.
        purpose: the meaning of the key, in the list of all keys.
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
    """Define a config key, as a dataclass field of a section.

    Args:
        default: the default value; a class is called to create it.
        rule: the allowed values.
        purpose: the meaning of the key.
        read: converts the value in a config to the value of the field.
        may_differ: whether ranks may have different values.
        compare: whether `==` compares the field.
    """
    about = {"rule": replace(rule, purpose=purpose, may_differ=may_differ), "read": read}
    if isinstance(default, type):
        return field(default_factory=default, metadata=about, compare=compare)
    return field(default=default, metadata=about, compare=compare)


class AnySection:
    """Base of the frozen dataclasses that define the keys of one dict of a config, and hold their values.

    Arguments of a subclass:
        required: keys that must be set.
        short: the key that is set if the config has a plain value instead of a dict (`zero = 2` sets `stage`).
        renamed: for each key, its names in other frameworks, separated by spaces.
        refused: rejected keys, each with the message that names the alternative.
        further: the field for unknown keys, such as keyword arguments of a user's class; only near-misses of known keys are
            rejected then.
        others: the rule for unknown keys. Without `further` and `others` unknown keys are errors.

    Fields that are not created by `key` are not read from a config.
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
        """Yield (key, problem, value) for every value that is valid by itself but contradicts another value.

        `given` is the dict in the config. It may have other problems, too; one error lists them all.
        """
        return iter(())

    @classmethod
    def build(cls, given: Any) -> Self:
        """Read a checked value of a config: None (not set), the plain value of `short`, or a dict."""
        rules = keys_of(cls)
        readers = {item.name: item.metadata["read"] for item in fields(cast(Any, cls)) if item.name in rules}
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
        """Convert a value in a config to a dict: the plain value of `short` becomes a dict with this key."""
        if given is None:
            return {}
        return given if isinstance(given, Mapping) or cls.short is None else {cls.short: given}

    @classmethod
    def completed(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Complete `values` with the defaults that depend on other keys."""
        return values

    def refuse(self, given: Mapping[str, Any]) -> None:
        """Raise for contradictions that can be checked only when the section is read.

        `given` has the keys that the config sets.
        """


class Section(AnySection):
    """A config section that is always in effect.

    If the config does not set the section, all keys of the section have their defaults.
    """

    @classmethod
    def read(cls, given: Any) -> Self:
        """Read a value of a config: None (not set), the plain value of `short`, or a dict."""
        return cls.build(given)


class SwitchedSection(AnySection):
    """A section that can be switched off: off if its key is not set, False or empty; on with all defaults if its key is True."""

    @classmethod
    def read(cls, given: Any) -> Self | None:
        """Read a bool, the plain value of `short`, or a dict; None if the section is off."""
        return cls.build(None if given is True else given) if given else None


_keys: dict[type, dict[str, Rule]] = {}


def keys_of(section: type[AnySection]) -> dict[str, Rule]:
    """The keys of a section with their rules, in the order of its fields."""
    if section not in _keys:
        given = cast(Any, section)
        _keys[section] = {item.name: item.metadata["rule"] for item in fields(given) if "rule" in item.metadata}
    return _keys[section]


# --- The check ---


def check_value(rule: Rule, path: KeyPath, value: Any) -> Iterator[Problem]:
    """Yield every problem of the value at `path`."""
    if _is_int(value) and abs(value) > _LARGEST:
        yield Problem(path, "is too large: the largest allowed number is 2**63 - 1", value)
    elif isinstance(value, dict) and rule.section is not None:
        yield from _check_section(rule.section, path, value)
    elif isinstance(value, (list, tuple)) and rule.items is not None:
        for index, item in enumerate(value):
            yield from check_value(rule.items, (*path, index), item)
    elif not rule.accepts(value):
        yield Problem(path, f"must be {rule.allows}", value)


def _check_section(section: type[AnySection], path: KeyPath, values: dict[Any, Any]) -> Iterator[Problem]:
    known = keys_of(section)
    allowed = f"unknown key; allowed: {listed(known)}"
    # A required key under a misspelled name is not also reported as missing.
    meant: set[str | None] = set()
    for name, value in values.items():
        if name in known:
            yield from check_value(known[name], (*path, name), value)
            continue

        # The known key that the user probably meant. Where further keys are allowed, only a single edit counts as a typo.
        close: str | None = None
        if isinstance(name, str) and name:
            if name.lower() in section.renamed:
                close = section.renamed[name.lower()]
            elif section.further is None and section.others is None:
                close = nearest(name, known)
            elif not is_ordinary(name, known):
                close = near(name, known)
        meant.update(section.required if name in section.refused else [close])

        text: str | None = None
        if not isinstance(name, str) or not name:
            text = NO_KEY
        elif name in section.refused:
            text = section.refused[name]
        elif close is not None:
            text = f"unknown key. Did you mean `{close}`?"
        elif section.others is None and section.further is None:
            text = allowed
        elif section.others is not None and known and not isinstance(value, dict):
            text = f"{allowed}, or a name of your own with {section.others.allows}"

        if text is not None:
            yield Problem((*path, name), text, value)
        elif section.others is not None:
            yield from check_value(section.others, (*path, name), value)
    for name in section.required:
        if name not in values and name not in meant:
            yield Problem((*path, name), f"is missing; it must be {known[name].allows}")


# --- Kinds of values ---


def any_of(*rules: Rule) -> Rule:
    """A rule for values that at least one of `rules` accepts. For a rule with a dict, use `with_dict`."""
    forms = [rule.allows for rule in rules]
    return Rule(f"{', '.join(forms[:-1])} or {forms[-1]}", lambda value: any(rule.accepts(value) for rule in rules))


def with_dict(rule: Rule, section: type[AnySection], form: str | None = None) -> Rule:
    """A rule for values that `rule` accepts, or a dict with the keys of `section`; `form` describes the dict in messages."""
    form = form or f"a dict of {', '.join(keys_of(section))}"
    return Rule(f"{rule.allows}, or {form}", rule.accepts, section)


def only_dict(section: type[AnySection], form: str | None = None) -> Rule:
    """A rule for a dict with the keys of `section`; `form` describes the dict in messages."""
    return Rule(form or f"a dict of {', '.join(keys_of(section))}", section=section)


def choice(*values: Any) -> Rule:
    """A rule for one of these values; 1 and True are different values."""
    return Rule(
        ", ".join(map(repr, values[:-1])) + (" or " if values[1:] else "") + repr(values[-1]),
        lambda value: any(type(value) is type(allowed) and value == allowed for allowed in values),
    )


def int_from(low: int) -> Rule:
    """A rule for an int >= `low`, not a bool."""
    return Rule(f"an int >= {low}", lambda value: _is_int(value) and value >= low)


def int_within(low: int, high: int) -> Rule:
    """A rule for an int from `low` to `high`, not a bool."""
    return Rule(f"an int from {low} to {high}", lambda value: _is_int(value) and low <= value <= high)


def number_above(low: float) -> Rule:
    """A rule for a number > `low`, not nan or a bool."""
    return Rule(f"a number > {low:g}", lambda value: _is_number(value) and value > low)


def number_from(low: float) -> Rule:
    """A rule for a number >= `low`, not nan or a bool."""
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
# The p of a p-norm: sums of higher powers of small gradients underflow in fp64.
ORDER = Rule(
    "a number > 0 and <= 32, or inf or 'inf'",
    lambda value: value == "inf" or (_is_number(value) and (0 < value <= 32 or value == math.inf)),
)
# These two are recognized by the names of their types, because torch may not be imported here.
AMP_MODE = Rule(
    "a member of AMP_TYPE", lambda value: isinstance(value, enum.Enum) and type(value).__name__ == "AMP_TYPE"
)
DTYPE = Rule("a torch dtype", lambda value: f"{type(value).__module__}.{type(value).__name__}" == "torch.dtype")
SHAPE = Rule("a list or tuple of ints >= 1", _is_shape)

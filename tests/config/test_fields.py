"""Sections: strict, open, and with a rule for further keys; and the kinds of values."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy
import pytest
import torch

from colonnade.config.fields import (
    COUNT,
    DTYPE,
    FRACTION,
    NONE,
    ORDER,
    SHAPE,
    TEXTS,
    Rule,
    Section,
    SwitchedSection,
    any_of,
    check_value,
    choice,
    key,
    keys_of,
    number_above,
    number_from,
    only_dict,
)
from colonnade.config.problems import dotted


@dataclass(frozen=True)
class Sizes(Section):
    """Sections with the same keys."""

    depth: int = key(1, COUNT, "")
    width: int = key(1, COUNT, "")


@dataclass(frozen=True)
class Strict(Sizes, required=("depth",), renamed={"depth": "deep"}, refused={"old": "is old"}): ...


@dataclass(frozen=True)
class Open(Sizes, required=("depth",), further="more"):
    more: dict[str, int] = field(default_factory=dict)


STRICT, OPEN = only_dict(Strict), only_dict(Open)


@dataclass(frozen=True)
class Further(Sizes, others=STRICT): ...


FURTHER = only_dict(Further)
COUNTED = "must be an int >= 1"


def told(rule: Rule, value: Any) -> dict[str, str]:
    return {dotted(problem.path): problem.text for problem in check_value(rule, ("a",), value)}


@pytest.mark.parametrize(
    ("rule", "value", "problems"),
    [
        (STRICT, {"depth": 1, "width": 2}, {}),
        (STRICT, {"dpeth": 1}, {"a.dpeth": "unknown key. Did you mean `depth`?"}),
        (STRICT, {"DEEP": 1}, {"a.DEEP": "unknown key. Did you mean `depth`?"}),
        (STRICT, {"old": 1}, {"a.old": "is old"}),
        (
            STRICT,
            {"width": 0},
            {"a.width": COUNTED, "a.depth": f"is missing; it {COUNTED}"},
        ),
        (STRICT, {"depth": 1, "zzz": 1}, {"a.zzz": "unknown key; allowed: depth, width"}),
        (STRICT, 3, {"a": "must be a dict of depth, width"}),
        (OPEN, {"depth": 1, "zzz": 1, "depth2": 1}, {}),
        (OPEN, {"detph": 1}, {"a.detph": "unknown key. Did you mean `depth`?"}),
        (FURTHER, {"mine": {"depth": 1}}, {}),
        (FURTHER, {"mine": {"depth": 0}}, {"a.mine.depth": "must be an int >= 1"}),
        (FURTHER, {"widht": {"depth": 1}}, {"a.widht": "unknown key. Did you mean `width`?"}),
        (
            Rule("a list", items=COUNT),
            [1, 0, (2,)],
            {"a[1]": COUNTED, "a[2]": COUNTED},
        ),
    ],
)
def test_section(rule: Rule, value: Any, problems: dict[str, str]) -> None:
    assert told(rule, value) == problems


@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        (COUNT, [1, 7, numpy.int64(3)], [0, -1, 1.0, True, "1", None]),
        (number_from(0), [0, 1.5, math.inf, numpy.float32(2)], [-1e-9, math.nan, True, "1", 1j]),
        (number_above(1), [1.1, 2], [1, math.nan, False]),
        (FRACTION, [0.5], [0, 1, 2.0]),
        (choice(0, 1, "auto"), [0, 1, "auto"], [True, 1.0, "a", None]),
        (any_of(COUNT, choice(-1), NONE), [1, -1, None], [0, "x", False]),
        (TEXTS, [[], ["a"], ("a", "b")], ["a", [1], {"a"}]),
        (SHAPE, [[1], (2, 3), [(1, 2), (3,)]], [[], [0], [True], "12", [[]]]),
        (ORDER, [2, 0.5, 32, math.inf, "inf"], [0, 33, 10**30, math.nan, True, "", "2", None]),
        (DTYPE, [torch.float32], ["float32", 3, numpy.dtype("float32")]),
    ],
)
def test_kind(rule: Rule, good: list[Any], bad: list[Any]) -> None:
    assert [value for value in good if not rule.accepts(value)] == []
    assert [value for value in bad if rule.accepts(value)] == []


def test_how_rules_tell_what_they_take() -> None:
    assert choice("auto").allows == "'auto'"
    assert choice(0, 1, 2).allows == "0, 1 or 2"
    assert any_of(COUNT, choice("auto"), NONE).allows == "an int >= 1, 'auto' or None"
    assert number_above(0.5).allows == "a number > 0.5"


@dataclass(frozen=True)
class Switched(SwitchedSection, short="size"):
    size: int = key(3, COUNT, "", read=int)
    names: list[str] = key(list, TEXTS, "", read=sorted)

    @classmethod
    def completed(cls, values: dict[str, Any]) -> dict[str, Any]:
        return {"names": ["all"], **values}

    def refuse(self, given: Any) -> None:
        assert "names" not in given or self.size > 1


def test_a_section_is_read_from_nothing_a_plain_value_or_a_dict() -> None:
    assert Open.read(None) == Open()
    assert Open.read({"width": 2, "depth": None, "mine": None}) == Open(width=2, more={"mine": None})  # type: ignore[dict-item]
    assert [Switched.read(off) for off in (None, False, 0, {})] == [None] * 4
    assert Switched.read(True) == Switched(3, ["all"])
    assert Switched.read(numpy.int64(2)) == Switched(2, ["all"])
    assert Switched.read({"names": ("b", "a")}) == Switched(3, ["a", "b"])
    with pytest.raises(AssertionError):
        Switched.read({"names": ["a"], "size": 1})


def test_the_keys_of_a_section_are_the_fields_that_say_what_they_may_be() -> None:
    assert list(keys_of(Open)) == ["depth", "width"]
    assert keys_of(Open) is keys_of(Open)

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
    choice,
    key,
    keys_of,
    number_above,
    number_from,
)


@dataclass(frozen=True)
class Sizes(Section):
    """Sections with the same keys."""

    depth: int = key(1, COUNT, "")
    width: int = key(1, COUNT, "")


@dataclass(frozen=True)
class Open(Sizes, required=("depth",), further="more"):
    more: dict[str, int] = field(default_factory=dict)


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

"""Sections: strict, open, and with a rule for further keys; and the kinds of values."""

from __future__ import annotations

import math
from typing import Any

import numpy
import pytest
import torch

from colonnade.config.problems import dotted
from colonnade.config.rules import (
    COUNT,
    DTYPE,
    FRACTION,
    NONE,
    ORDER,
    SHAPE,
    TEXTS,
    Rule,
    Section,
    any_of,
    check_value,
    choice,
    number_above,
    number_from,
    only_dict,
)

KEYS = {"depth": COUNT, "width": COUNT}
STRICT = only_dict(Section(KEYS, required=("depth",), renamed={"deep": "depth"}, refused={"old": "is old"}))
OPEN = only_dict(Section(KEYS, required=("depth",), is_open=True))
COUNTED = "must be an int >= 1"
FURTHER = only_dict(Section(KEYS, others=STRICT))


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

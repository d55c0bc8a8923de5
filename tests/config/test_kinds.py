"""Kinds of values: what each rule takes and how it tells that."""

from __future__ import annotations

import math
from typing import Any

import numpy
import pytest
import torch

from colonnade.config.kinds import (
    COUNT,
    DTYPE,
    FRACTION,
    LEVEL,
    NONE,
    SHAPE,
    TEXTS,
    any_of,
    choice,
    number_above,
    number_from,
)
from colonnade.config.rules import Rule


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
        (LEVEL, ["info", "DEBUG", 10], ["loud", -1, True, None]),
        (DTYPE, [torch.float32], ["float32", 3]),
    ],
)
def test_rule(rule: Rule, good: list[Any], bad: list[Any]) -> None:
    assert [value for value in good if not rule.accepts(value)] == []
    assert [value for value in bad if rule.accepts(value)] == []


def test_how_rules_tell_what_they_take() -> None:
    assert choice("auto").allows == "'auto'"
    assert choice(0, 1, 2).allows == "0, 1 or 2"
    assert any_of(COUNT, choice("auto"), NONE).allows == "an int >= 1, 'auto' or None"
    assert number_above(0.5).allows == "a number > 0.5"

"""The text of a config: as one would write it."""

from __future__ import annotations

import enum
import math
from typing import NamedTuple

import pytest

from colonnade.config import Config
from colonnade.config.text import expression, shortened, source


class Amp(enum.Enum):
    NAIVE = "naive"


class Pair(NamedTuple):
    x: int
    y: int


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"size": 2, "mode": "1d"}, "dict(size=2, mode='1d')"),
        ({"a b": 1, 2: (3,)}, "{'a b': 1, 2: (3,)}"),
        ({"class": 1}, "{'class': 1}"),
        ({"__debug__": 1}, "{'__debug__': 1}"),
        ({}, "dict()"),
        ([], "[]"),
        ((), "()"),
        ([1, (2, 3), {}], "[1, (2, 3), dict()]"),
        (set(), "set()"),
        ({2, 1}, "{1, 2}"),
        (frozenset(), "frozenset()"),
        (frozenset({1}), "frozenset({1})"),
        (math.inf, "float('inf')"),
        (-math.inf, "float('-inf')"),
        (math.nan, "float('nan')"),
        (1e-3, "0.001"),
        (complex(1, math.inf), "complex(1.0, float('inf'))"),
        (Amp.NAIVE, "Amp.NAIVE"),
        (Pair(1, 2), "Pair(x=1, y=2)"),
        (None, "None"),
        (Config(a=Config(b=1)), "dict(a=dict(b=1))"),
    ],
)
def test_expression(value: object, text: str) -> None:
    assert expression(value) == text


def test_a_value_without_literal_form_is_its_repr() -> None:
    value = object()
    assert source({"x": value}) == f"x = {value!r}"


def test_long_values_are_broken_into_lines() -> None:
    values = {
        "BATCH_SIZE": 8,
        "parallel": {"pipeline": 2, "tensor": {"size": 4, "mode": "2.5d", "depth": 1, "note": "n" * 40}},
        "gradient_handler": [{"type": "FirstGradientHandler" * 2}, {"type": "SecondGradientHandler" * 2}],
    }
    assert source(values).splitlines() == [
        "BATCH_SIZE = 8",
        "parallel = dict(",
        "    pipeline=2,",
        f"    tensor=dict(size=4, mode='2.5d', depth=1, note='{'n' * 40}'),",
        ")",
        "gradient_handler = [",
        "    dict(type='FirstGradientHandlerFirstGradientHandler'),",
        "    dict(type='SecondGradientHandlerSecondGradientHandler'),",
        "]",
    ]


def test_keys_that_are_no_names_come_last_and_shadow_nothing() -> None:
    text = source({"dict": 1, "a b": {"x": 2}, "y": {"z": 3}})
    assert text == "y = dict(z=3)\nglobals().update({'dict': 1, 'a b': dict(x=2)})"


def test_shortened_fits_one_line() -> None:
    assert shortened(["a\nb"]) == r"['a\nb']"
    assert len(shortened("x" * 500)) == 60
    assert shortened("x" * 500).endswith("...")

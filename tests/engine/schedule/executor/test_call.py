"""A stage that cannot take what it is given says so; an error inside a stage stays what it is."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from torch import nn

from colonnade.engine.schedule.executor.call import format_signature, format_value, stage_mismatch


class Fails(nn.Module):
    def forward(self, x, y=None):
        raise AssertionError


@pytest.mark.parametrize(
    ("inputs", "one_value", "error", "reason"),
    [
        ((1, 2, 3), False, TypeError("inside"), "too many positional arguments"),
        ((1, 2), False, TypeError("inside"), None),
        ((1, 2), True, TypeError("inside"), None),
        (
            (1,),
            False,
            RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
            "mat1 and mat2 shapes cannot be multiplied",
        ),
        ((1,), False, RuntimeError("out of luck"), None),
        ((1,), False, NotImplementedError("mat1 and mat2 shapes cannot be multiplied"), None),
    ],
)
def test_only_an_error_about_the_form_is_one_between_stages(inputs, one_value, error, reason):
    assert stage_mismatch(Fails(), inputs, one_value, error) == reason


def test_values_and_signatures_in_one_line():
    value = {"a": torch.ones(2, 3), "b": [torch.tensor(True), (1, "x")]}
    assert format_value(value) == "{'a': float32[2, 3], 'b': [bool[], (1, 'x')]}"
    assert format_value(namedtuple("Pair", "a b")(1, 2)) == "(1, 2)"
    assert format_signature(Fails()) == "Fails.forward(x, y=None)"
    assert format_signature(nn.Linear(2, 3)).endswith(" with weight [3, 2], bias [3]")

"""A stage that cannot take what it is given says so; an error inside a stage stays what it is."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from torch import nn

from colonnade.engine.schedule.micro_batch import (
    MicroBatch,
    call_module,
    format_signature,
    format_value,
    stage_mismatch,
)
from colonnade.errors import ScheduleError
from colonnade.parallel.split import Stage


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


class Given(nn.Module):
    def forward(self, *given):
        return given


@pytest.mark.parametrize(
    ("stage", "module", "found"),
    [
        (0, Stage([("a", Given()), ("b", Given())], takes_one_value=True), ((1, 2),)),
        (1, Stage([("a", Given()), ("b", Given())], takes_one_value=True), (((1, 2),),)),
        (2, Stage([("a", Given())], takes_one_value=True), ((1, 2),)),
        (1, Stage([("a", Given()), ("b", Given())], takes_one_value=False), (1, 2)),
        (0, Given(), (1, 2)),
        (1, Given(), (1, 2)),
    ],
)
def test_a_stage_of_a_sequential_takes_what_the_layer_before_it_gave_as_one(stage, module, found):
    assert call_module(stage, module, (1, 2), MicroBatch(0)) == found


def test_what_a_stage_cannot_take_is_told_with_both_sides_unless_it_is_the_first():
    layers = Stage([("first", nn.Linear(2, 3)), ("second", nn.Bilinear(3, 3, 1))], takes_one_value=True)
    wrong = torch.ones(1, 4)
    for stage in (1, 2):
        with pytest.raises(ScheduleError) as error:
            call_module(stage, layers, wrong, MicroBatch(0))
        assert f"stage {stage} cannot take the output of stage {stage - 1}: mat1 and mat2 shapes" in str(error.value)
        assert "returns: float32[1, 4]" in str(error.value)
        assert "takes: Linear.forward(input: torch.Tensor)" in str(error.value)
    with pytest.raises(RuntimeError, match=r"^mat1 and mat2 shapes"):
        call_module(0, layers, wrong, MicroBatch(0))
    with pytest.raises(AssertionError):
        call_module(1, Fails(), (1,), MicroBatch(0))

"""Batches are cut into near-equal pieces and joined again; a stage that cannot take what it is given says so."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from colonnade.engine.schedule.micro_batch import (
    MicroBatch,
    call_module,
    format_signature,
    format_value,
    join,
    split_into_micro_batches,
    stage_mismatch,
)
from colonnade.errors import ScheduleError
from colonnade.parallel.split import Stage

Pair = namedtuple("Pair", "left right")


@given(st.integers(1, 40), st.integers(1, 40))
def test_pieces_are_near_equal_weighted_by_rows_and_join_to_the_batch(rows: int, count: int) -> None:
    data, label = torch.arange(rows * 2).view(rows, 2), torch.arange(rows)
    if rows < count:
        with pytest.raises(ScheduleError, match=f"{rows} rows cannot be split into {count} micro-batches"):
            split_into_micro_batches(data, label, count)
        return
    pieces = split_into_micro_batches(data, label, count)
    sizes = [piece.data.size(0) for piece in pieces]
    assert sum(sizes) == rows
    assert max(sizes) - min(sizes) <= 1
    assert [piece.weight for piece in pieces] == [size / rows for size in sizes]
    assert torch.equal(join([piece.data for piece in pieces]), data)
    assert torch.equal(join([piece.label for piece in pieces]), label)


def test_nested_values_are_cut_and_the_rest_goes_whole_into_every_piece() -> None:
    data = {
        "x": torch.arange(4),
        "more": (torch.ones(4, 2), [torch.zeros(4)]),
        "n": 7,
        "temperature": torch.tensor(2.0),
    }
    pieces = split_into_micro_batches(data, Pair(torch.arange(4), "kind"), 2)
    second = pieces[1]
    assert second.data["x"].tolist() == [2, 3]
    assert second.data["more"][1][0].shape == (2,)
    assert second.data["n"] == 7
    assert second.data["temperature"] == 2.0
    assert isinstance(second.label, Pair)
    assert second.label.left.tolist() == [2, 3]
    assert second.label.right == "kind"


def test_an_evaluation_fills_a_batch_of_few_rows_with_copies_that_do_not_count() -> None:
    data, label = torch.arange(2.0)[:, None], torch.arange(2)
    pieces = split_into_micro_batches(data, label, 4, fill=True)
    assert [piece.data.tolist() for piece in pieces] == [[[0.0]], [[1.0]], [[1.0]], [[1.0]]]
    assert [(piece.index, piece.rows, piece.weight, piece.counts) for piece in pieces] == [
        (0, 1, 0.5, True),
        (1, 1, 0.5, True),
        (2, 0, 0.0, False),
        (3, 0, 0.0, False),
    ]
    assert all(piece.counts for piece in split_into_micro_batches(data, label, 2, fill=True))
    with pytest.raises(ScheduleError, match="0 rows"):
        split_into_micro_batches(data[:0], label[:0], 2, fill=True)


def test_what_cannot_be_cut_is_told() -> None:
    with pytest.raises(ScheduleError, match=r"data\['x'\] has 4, data\['mask'\] has 2, label has 4"):
        split_into_micro_batches({"x": torch.zeros(4), "mask": torch.zeros(2, 2)}, torch.zeros(4), 2)
    with pytest.raises(ScheduleError, match="no tensor with rows"):
        split_into_micro_batches({"n": 7}, None, 2)


@pytest.mark.parametrize(
    ("pieces", "joined"),
    [
        ([torch.ones(1, 2), torch.zeros(2, 2)], torch.tensor([[1.0, 1], [0, 0], [0, 0]])),
        ([torch.tensor(1.0), torch.tensor(2.0)], torch.tensor([1.0, 2.0])),
        (["a", "a"], "a"),
        (["a", "b"], ["a", "b"]),
        ([None, None], None),
        ([3, 3, 4], [3, 3, 4]),
        ([{"a": 1}, {"a": 1}], {"a": 1}),
        ([{"a": 1}, {"a": 2}], {"a": [1, 2]}),
    ],
)
def test_pieces_as_one(pieces, joined):
    found = join(pieces)
    assert torch.equal(found, joined) if isinstance(joined, torch.Tensor) else found == joined


@pytest.mark.parametrize(
    "pieces",
    [
        [torch.ones(1, 2), torch.ones(1, 3)],
        [torch.ones(1), torch.tensor(1.0)],
        [torch.tensor(1.0), 1.0],
        [1.0, torch.tensor(1.0)],
        [torch.tensor([1.0, 1.0]), "text"],
        [{"a": 1}, {"b": 1}],
        [{"a": 1}, {"a": 1}, {"b": 1}],
        [torch.tensor(1.0), torch.ones(1), torch.ones(1)],
        [torch.ones(1, 2), torch.ones(2, 2), torch.ones(1, 3)],
    ],
)
def test_pieces_that_do_not_fit_together_stay_a_list(pieces):
    found = join(pieces)
    assert isinstance(found, list)
    assert all(one is other for one, other in zip(found, pieces, strict=True))


# -- calls of stages ---
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

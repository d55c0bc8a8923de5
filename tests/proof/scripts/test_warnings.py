"""What is said of a script beside the comparison, and what it clips by: on records, with no process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from colonnade.proof.compare import warn_of_equal_stages
from colonnade.proof.record import BatchAxis, Piece, Record, RecordedStep, RunInfo, TensorNote
from colonnade.proof.scripts import truth_of_step, warn_of_same_batches, warn_of_uncleared_gradients

FIRST, SECOND = torch.tensor([1.0, 2.0]), torch.tensor([0.5, -3.0])


def step(own: Tensor, total: Tensor, **more) -> RecordedStep:
    return RecordedStep(raw={"w": {0: own / 2, 1: own / 2}}, total={"w": [Piece(total)]}, **more)


def test_a_step_that_has_the_gradient_of_the_one_before_is_warned_of() -> None:
    kept = Record(0, steps=[step(FIRST, FIRST), step(SECOND, FIRST + SECOND)])
    assert "Is a call of zero_grad missing?" in warn_of_uncleared_gradients(kept)[0]
    assert warn_of_uncleared_gradients(Record(0, steps=[step(FIRST, FIRST), step(SECOND, SECOND)])) == []
    clipped = step(FIRST, FIRST, clipped={"w": [Piece(FIRST / 10)]})
    assert warn_of_uncleared_gradients(Record(0, steps=[clipped, step(SECOND, FIRST / 10 + SECOND)]))
    assert warn_of_uncleared_gradients(Record(0, steps=[clipped, step(SECOND, FIRST + SECOND)])) == []


@pytest.mark.parametrize(("wrapped", "warned"), [(True, True), (False, False)])
def test_ranks_of_a_data_parallel_wrapper_that_are_given_the_same_are_warned_of(wrapped: bool, warned: bool) -> None:
    axes = [BatchAxis("data", 1, True), BatchAxis("model", 2, False)]
    given = {"batch": [FIRST]}
    runs = [
        RunInfo(axes, {"data": 0, "model": rank}, data_parallel=wrapped, given=given, given_in={"batch": [0]})
        for rank in range(2)
    ]
    records = [Record(rank, run=run) for rank, run in enumerate(runs)]
    assert bool(warn_of_same_batches(records)) == warned


def test_the_norm_is_that_of_all_unless_the_script_clips_by_another() -> None:
    whole, part = 5**0.5, 1.0
    for norm in (whole, part):
        record = Record(0, steps=[step(FIRST, FIRST, norm=norm)])
        assert truth_of_step(record, 0).norm == pytest.approx(norm)


@pytest.mark.parametrize(
    ("names", "placement", "stages", "warned"),
    [
        (("w", "w"), "replicated", (0, 1), True),
        (("w", "w"), "replicated", (0, 0), False),  # data ranks
        (("w", "v"), "replicated", (0, 1), False),
        (("w", "w"), "{PIPELINE: Tied(0, 1 as 'w')}", (0, 1), False),
    ],
)
def test_stages_that_all_hold_the_same_parameters_are_warned_of(
    names: tuple[str, str], placement: str, stages: tuple[int, int], warned: bool
) -> None:
    records = [
        Record(rank, {name: TensorNote((name,), (2,), None, placement)}, run=RunInfo(coordinates={"pipeline": stage}))
        for rank, (name, stage) in enumerate(zip(names, stages, strict=True))
    ]
    told = warn_of_equal_stages(records)
    assert bool(told) == warned
    assert all("colonnade.split(model, num_stages=2)" in note for note in told)

"""Calls of stages and criteria that cannot work: the error says what to write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import colonnade
from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.engine.schedule.loss import call_criterion
from colonnade.engine.schedule.micro_batch import split_into_micro_batches
from colonnade.errors import ScheduleError
from colonnade.testing import run_world


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x).tanh()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _as_whole() -> list[str]:
    """What each way to give a batch to a stage says, and that the schedule takes it afterwards."""
    said = []
    for chunks in (1, 2):
        schedule = {"type": "Interleaved1F1B" if chunks == 2 else "OneFOneB", "num_microbatches": 2}
        if chunks == 2:
            schedule["num_chunks"] = 2
        with launch(
            {"parallel": {"pipeline": 2}, "schedule": schedule}, context=ParallelContext(), verbose=False
        ) as gpc:
            x = torch.ones(4, 4)
            parts = colonnade.split(Model(), num_stages=2 * chunks, sample=x)
            engine = initialize(parts, lambda p: torch.optim.SGD(p, lr=0.1), nn.MSELoss(), context=gpc)[0]
            calls: list[tuple[list[Any], dict[str, Any]]] = [([], {"x": x}), ([{"x": x}], {})]
            if gpc.get_global_rank() == 1 or chunks == 2:
                calls.append(([x], {}))
            for args, kwargs in calls:
                with pytest.raises(ScheduleError) as caught:
                    engine(*args, **kwargs)
                said.append(str(caught.value))
            engine.execute_schedule(iter([(x, x)]))
            engine.step()
            engine.close()
    return said


def test_a_batch_for_one_stage_is_refused_with_the_schedule_as_the_way():
    first, second = run_world(2, _as_whole, timeout=30).values
    assert (len(first), len(second)) == (5, 6)
    for said in (*first, *second):
        assert "engine.execute_schedule(iter([batch]))" in said
        assert said.endswith("[C132]")


def test_a_batch_without_rows_is_named():
    with pytest.raises(ScheduleError, match=r"^a batch of 0 rows cannot be split, because a pipeline.*\[C052\]$"):
        split_into_micro_batches(torch.ones(0, 4), torch.ones(0), 2)
    with pytest.raises(ScheduleError, match="Set num_microbatches to 1 or less"):
        split_into_micro_batches(torch.ones(1, 4), torch.ones(1), 2)


def _two(output: Any, label: Any) -> Any:
    return output - label


def test_a_criterion_that_is_given_more_values_than_it_takes_is_told_whose_they_are():
    one = torch.ones(())
    with pytest.raises(ScheduleError) as caught:
        call_criterion(_two, (one, one), one)
    assert "_two takes at most 2 arguments, but 3 were given: the model returned 2 values" in str(caught.value)
    assert "lambda output_0, output_1, label: ..." in str(caught.value)
    with pytest.raises(
        ScheduleError, match="MSELoss takes at most 2 arguments, but 4 were given: the label is 3 values"
    ):
        call_criterion(nn.MSELoss(), one, (one, one, one))
    with pytest.raises(TypeError, match="unsupported operand"):  # an error inside is the user's own
        call_criterion(_two, None, one)
    assert call_criterion(lambda *given: len(given), (one, one), one) == 3


def _scaled(output: Any, label: Any, weight: Any = None) -> Any:
    return (output - label) * (1 if weight is None else weight)


def test_so_is_one_whose_options_take_the_values_in_or_that_is_given_no_label_or_labels_by_name():
    logits, labels = torch.ones(6, 5), torch.zeros(6, dtype=torch.int64)
    for criterion, output in (
        (F.cross_entropy, (logits, None)),
        (F.mse_loss, (logits, logits)),
        (_scaled, (logits, None)),
    ):
        with pytest.raises((TypeError, ValueError, RuntimeError)) as inside:
            call_criterion(criterion, output, labels)
        (note,) = inside.value.__notes__  # the error stays torch's own
        assert f"{criterion.__name__} was given 3 arguments: the model returned 2 values" in note
    for criterion, label in ((nn.CrossEntropyLoss(), {"target": labels}), (lambda output: output.mean(), None)):
        with pytest.raises(ScheduleError, match=r"was given [23]: the model returned 2 values.*\[C045\]$"):
            call_criterion(criterion, (logits, logits), label)
    with pytest.raises(ValueError, match="batch_size") as alone:  # as many as it needs
        call_criterion(F.cross_entropy, logits, labels[:3])
    assert not hasattr(alone.value, "__notes__")

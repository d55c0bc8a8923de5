"""One step of one rank: phases, rows, shapes and what is done where a stage cannot be split."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from colonnade.engine.schedule import executor as step_module
from colonnade.engine.schedule.actions import Action, parse_table
from colonnade.engine.schedule.executor import Executor, StepState
from colonnade.engine.schedule.micro_batch import MicroBatch, split_into_micro_batches
from colonnade.errors import ScheduleError
from tests.engine.schedule import models
from tests.engine.schedule.executor.test_executor import loss_of


class Clock:
    """Which phases were entered, one after another."""

    def __init__(self) -> None:
        self.told = ["before"]

    def enter(self, phase: str) -> str:
        self.told.append(phase)
        return self.told[-2]


def executor_of_one() -> tuple[Any, StepState]:
    """An executor without transfers, and the state of a step."""
    made = Executor([nn.Identity()], parse_table(["0F0 0B0"]), loss_fn=loss_of)
    return made, StepState([], True, True, False, 1.0, 1.0)


def test_the_time_of_an_action_counts_in_its_phase():
    clock: Any = Clock()
    executor = Executor(
        models.build(models.Simple, 2), parse_table(["0F0 1F0 1I0 1W0 0B0"]), loss_fn=loss_of, waits=clock
    )
    executor.run(split_into_micro_batches(*models.batch_for(models.Simple, 2), 1))
    assert clock.told == ["before", "forward", "forward", "backward", "backward", "backward"]


def test_waiting_for_another_rank_is_communication_and_then_the_phase_goes_on():
    made, state = executor_of_one()
    made.waits = Clock()
    made.link_over = lambda key: SimpleNamespace(take=lambda key: f"taken {key}")
    assert made._take(state, Action.parse("1RECV_F0")) == "taken 1RECV_F0"
    assert made.waits.told == ["before", "communication", "before"]


@pytest.mark.parametrize(
    ("fed", "here", "is_refused"), [(3, 3, False), (3, 2, True), (None, 2, False), (3, None, False)]
)
def test_labels_belong_to_the_rows_that_the_first_stage_was_given(fed, here, is_refused):
    made, state = executor_of_one()
    state.rows[4] = fed
    batch = MicroBatch(4, rows=here, counts=False)
    if is_refused:
        with pytest.raises(
            ScheduleError, match=r"^micro-batch 4 has 3 rows on the first stage of the pipeline and 2 on"
        ):
            made._compute_loss(state, None, batch)
    else:
        assert made._compute_loss(state, None, batch) == []


@pytest.mark.parametrize(
    ("promised", "output", "returned"),
    [
        (None, torch.ones(2, 3), None),
        (None, "text", None),
        ([2, 3], torch.ones(2, 3), None),
        ([2, 4], torch.ones(2, 3), r"returned \(2, 3\)"),
        ([2, 3], (torch.ones(2, 3),), "returned tuple"),
    ],
)
def test_a_promised_shape_is_held(promised, output, returned):
    made, state = executor_of_one()
    made.tensor_shape, made.facts = promised, SimpleNamespace(stage_ranks=(0, 1), num_stages=2)
    made.forward, state.micro_batches = lambda *given: output, [MicroBatch(0)]
    if returned is None:
        made._forward(state, Action.parse("0F0"))
        assert list(state.outbox) == [Action.parse("0SEND_F0")]
    else:
        with pytest.raises(ScheduleError, match=returned):
            made._forward(state, Action.parse("0F0"))


def test_a_stage_that_cannot_be_split_is_tried_once(monkeypatch):
    said: list[str] = []
    tried: list[int] = []
    split = step_module.backward_input

    def watched(roots: Any, grads: Any, inputs: Any) -> Any:
        tried.append(1)
        return split(roots, grads, inputs)

    monkeypatch.setattr(step_module, "get_dist_logger", lambda: SimpleNamespace(warning=said.append))
    monkeypatch.setattr(step_module, "backward_input", watched)
    stages = models.build(models.Unsplittable, 2)
    executor = Executor(stages, parse_table(["0F0 1F0 1I0 0I0 0F1 1F1 1I1 0I1 0W0 1W0 0W1 1W1"]), loss_fn=loss_of)
    executor.run(split_into_micro_batches(*models.batch_for(models.Unsplittable, 4), 2))
    _, _, expected = models.truth(models.Unsplittable, 2, 4)
    found = {f"{at}.{name}": p.grad for at, stage in enumerate(stages) for name, p in stage.named_parameters()}
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    assert len(said) == len(tried) == 1
    assert executor.unsplittable == {1}


def test_a_stage_that_computes_again_is_not_split(monkeypatch):
    """Nor one of FSDP2; a stage with either is enough."""

    class Sharded(models.Simple):
        def _get_fsdp_state(self) -> None: ...

    stages: list[nn.Module] = [models.Simple(0, 2), nn.Sequential(models.Simple(1, 2), Sharded(1, 2))]
    executor = Executor(stages, parse_table(["0F0 1F0 1B0 0B0"]), loss_fn=loss_of)
    assert executor.unsplittable == {1}
    from colonnade.engine.schedule import executor as module

    monkeypatch.setattr(module, "recomputes", lambda stage: stage is stages[0])
    executor = Executor(stages, parse_table(["0F0 1F0 1B0 0B0"]), loss_fn=loss_of)
    assert executor.unsplittable == {0, 1}

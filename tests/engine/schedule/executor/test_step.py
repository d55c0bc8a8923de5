"""One step of one rank: phases, rows, shapes and what is done where a stage cannot be split."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from colonnade.engine.schedule import executor as step_module
from colonnade.engine.schedule.actions import parse_table
from colonnade.engine.schedule.executor import Executor
from colonnade.engine.schedule.micro_batch import split_into_micro_batches
from tests.engine.schedule import models
from tests.engine.schedule.executor.test_executor import loss_of


class Clock:
    """Which phases were entered, one after another."""

    def __init__(self) -> None:
        self.told = ["before"]

    def enter(self, phase: str) -> str:
        self.told.append(phase)
        return self.told[-2]


def test_the_time_of_an_action_counts_in_its_phase():
    clock: Any = Clock()
    executor = Executor(
        models.build(models.Simple, 2), parse_table(["0F0 1F0 1I0 1W0 0B0"]), loss_fn=loss_of, waits=clock
    )
    executor.run(split_into_micro_batches(*models.batch_for(models.Simple, 2), 1))
    assert clock.told == ["before", "forward", "forward", "backward", "backward", "backward"]


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

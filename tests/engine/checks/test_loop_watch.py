"""What is looked at in a user's own loop, and how often."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.checks import LoopWatch
from colonnade.errors import GradientError


def watched(sync: Any = None) -> tuple[nn.Linear, torch.optim.SGD, LoopWatch]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, LoopWatch(model, optimizer, ParallelContext(), sync)


def test_parameters_are_looked_at_in_the_first_steps_and_then_rarely(monkeypatch):
    looked: list[int] = []
    _, _, watch = watched()
    monkeypatch.setattr(LoopWatch, "look", lambda self: looked.append(self._steps))
    for _ in range(250):
        watch.end_step()
    assert looked == [1, 2, 100, 200]
    watch.close()


def test_a_watch_that_is_gone_looks_at_nothing_and_one_whose_model_is_gone_neither():
    model, _, watch = watched()
    model.bias = nn.Parameter(torch.zeros(2))
    del watch
    gc.collect()
    model.load_state_dict(model.state_dict())
    model, _, watch = watched()
    del model
    gc.collect()
    watch.end_step()
    watch.close()


def steps(optimizer: torch.optim.Optimizer) -> bool:
    try:
        optimizer.step()
    except GradientError:
        return False
    return True


def test_of_two_engines_of_one_optimizer_either_may_have_summed():
    syncs = [SimpleNamespace(synchroniser=SimpleNamespace(unprepared_gradients=True)) for _ in range(2)]
    model, optimizer, one = watched(syncs[0])
    two = LoopWatch(model, optimizer, ParallelContext(), syncs[1])  # type: ignore[arg-type]
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    assert steps(optimizer)  # there is no gradient
    model.bias.grad = torch.zeros(2)
    assert not steps(optimizer)
    syncs[1].synchroniser.unprepared_gradients = False
    assert steps(optimizer)
    two.unsummed = True
    assert not steps(optimizer)
    two.close()
    assert one.unprepared_gradients
    assert not steps(optimizer)  # the other still looks
    del one
    gc.collect()
    assert steps(optimizer)


def test_blocks_that_compute_activations_again_are_given_back():
    model = nn.Sequential(nn.Linear(2, 2))
    watch = LoopWatch(model, SimpleNamespace(), ParallelContext())
    vars(model[0])["_colonnade_runs"] = "how"
    watch.close()
    assert model[0]._colonnade_runs is None

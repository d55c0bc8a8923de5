"""What is looked at in a user's own loop, and how often."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.checks.loop_watch import LoopWatch
from colonnade.errors import GradientError


def test_parameters_are_looked_at_in_the_first_steps_and_then_rarely(monkeypatch):
    looked: list[int] = []
    model = nn.Linear(2, 2)
    watch = LoopWatch(model, torch.optim.SGD(model.parameters(), lr=0.1), ParallelContext())
    monkeypatch.setattr(LoopWatch, "look", lambda self: looked.append(self._steps))
    for _ in range(250):
        watch.end_step()
    assert looked == [1, 2, 100, 200]
    watch.close()


def test_a_parameter_that_was_replaced_is_named():
    model = nn.Linear(2, 2)
    watch = LoopWatch(model, torch.optim.SGD(model.parameters(), lr=0.1), ParallelContext())
    watch.end_step()
    model.extra = nn.Parameter(torch.zeros(1))  # what is new is nobody's yet
    watch.look()
    model.bias = nn.Parameter(torch.zeros(2))
    with pytest.raises(GradientError, match="'bias' is another parameter than at initialize"):
        watch.end_step()
    watch.close()

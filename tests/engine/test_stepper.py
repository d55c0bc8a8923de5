"""The step of an engine by its parts: also what only a GPU does, with parts that are made up."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine import stepper
from colonnade.engine.build import initialize
from colonnade.engine.stepper import Stepper
from colonnade.errors import ConfigError

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


def bare(**parts: Any) -> Any:
    """A stepper of these parts alone."""
    made = Stepper.__new__(Stepper)
    vars(made).update(parts)
    return made


@pytest.mark.parametrize(
    ("device", "world_size", "drops", "waits", "alike", "expected"),
    [
        (CUDA, 2, True, False, True, True),
        (CPU, 2, True, False, True, False),
        (CUDA, 1, True, False, True, False),
        (CUDA, 2, False, False, True, False),
        (CUDA, 2, True, True, True, False),
        (CUDA, 2, True, False, False, False),  # another rank cannot
    ],
)
def test_flags_are_piggybacked_where_all_ranks_can(monkeypatch, device, world_size, drops, waits, alike, expected):
    monkeypatch.setattr(stepper, "PiggybackedFlags", lambda device: "flags")
    monkeypatch.setattr(stepper, "is_same_everywhere", lambda number, device: alike)
    given: list[Any] = []
    synchroniser: Any = SimpleNamespace(host_waits=waits, agree_by=given.append)
    context = SimpleNamespace(device=device, world_size=world_size)
    made = bare(_context=context, _step=SimpleNamespace(skips_on_device=drops))
    found = made._piggybacked_flags(synchroniser)
    assert (found, given) == (("flags", ["flags"]) if expected else (None, []))


def test_a_graph_step_cannot_raise_on_the_host():
    config = {"cuda_graph": "step", "clip_grad_norm": {"max_norm": 1.0, "nonfinite": "raise"}}
    with (
        launch(config, context=ParallelContext(), verbose=False) as gpc,
        pytest.raises(ConfigError, match=r"^cuda_graph is not available with .* Use nonfinite='skip'"),
    ):
        initialize(nn.Linear(1, 1), lambda p: torch.optim.SGD(p, lr=0.1), context=gpc)


def test_a_dropped_step_is_said_when_the_next_one_begins(caplog):
    with launch({"clip_grad_norm": 1.0}, context=ParallelContext(), verbose=False) as gpc:
        model = nn.Linear(1, 1)
        engine = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), context=gpc)[0]
        logging.getLogger("colonnade").propagate = True
        for bad in (True, False):
            engine.zero_grad()
            engine.backward(engine(torch.full((1, 1), float("inf") if bad else 1.0)).sum())
            engine.step()
        engine.zero_grad()
        assert caplog.text.count("step skipped") == 1
        assert all(parameter.grad is None for parameter in model.parameters())
        engine.close()

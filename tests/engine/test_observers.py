"""Who looks on at an engine is told of each loss, of final gradients, and of each step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.engine.engine import ON_ENGINE, Observer, announce


class _Heard(Observer):
    def __init__(self, model: nn.Module) -> None:
        self.model, self.said = model, list[Any]()

    def on_loss(self, loss: Any) -> None:
        self.said.append("loss")

    def on_reduced(self, scale: Any) -> None:
        self.said.append(("reduced", all(p.grad is not None for p in self.model.parameters()), scale))

    def on_stepped(self) -> None:
        self.said.append("stepped")


def test_an_observer_hears_every_pass_and_every_step_once():
    with launch({"gradient_accumulation": 2}, context=ParallelContext(), verbose=False) as gpc:
        model = nn.Linear(2, 2)
        engine, *_ = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), context=gpc)
        heard = _Heard(model)
        engine.observers.append(heard)
        for _ in range(2):
            engine.zero_grad()
            engine.execute_schedule(iter([(torch.ones(1, 2), torch.zeros(1, 2))]))
            engine.step()
        assert heard.said == ["loss", "loss", ("reduced", True, None), "stepped"]
        engine.observers.remove(heard)
        engine.zero_grad()
        engine.execute_schedule(iter([(torch.ones(1, 2), torch.zeros(1, 2))]))
        assert len(heard.said) == 4


SEEN = []


def test_a_new_engine_is_shown_to_whom_the_environment_names(monkeypatch):
    announce("nobody looks")
    monkeypatch.setenv(ON_ENGINE, f"{__name__}:look")
    announce("an engine")
    assert SEEN == ["an engine"]


def look(engine):
    SEEN.append(engine)

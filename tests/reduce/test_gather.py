"""Gathers that run on into the next forward pass: for parameters that their own modules announce, and no others."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.testing import run_world


class Reaches(nn.Module):
    """Calls one child, and uses the weight of the other without a call of it."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.reached = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.called(x), self.reached.weight, self.reached.bias)


def _late() -> tuple[set[str], set[str]]:
    """The parameters whose gather may be under way after the first step, and after the second."""
    config = {"zero": {"stage": 1, "gather_ahead": True, "bucket_mb": 0.0001}, "sync": {"shared_memory": False}}
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        model = Reaches()
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        engine = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), context=gpc)[0]
        seen = []
        for _ in range(2):
            engine.zero_grad()
            engine.backward(engine(torch.ones(2, 8)).sum())
            engine.step()
            seen.append(
                {
                    names[id(parameter)]
                    for gather in engine.optimizer._gathers
                    for one in gather.values
                    if gather.is_under_way(one)
                    for parameter in one.bucket.parameters
                }
            )
        engine.optimizer.wait()
        engine.close()
        return seen[0], seen[1]


def test_only_parameters_that_their_module_announces_may_be_late():
    for first, second in run_world(2, _late).values:
        assert first == second == {"called.weight", "called.bias"}

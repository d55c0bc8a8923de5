"""An engine that is interrupted and resumed takes the same steps as one that was not, to the bit, on every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade._launch import launch
from colonnade.checkpoint import CheckpointManager
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.testing import compare, gather_weights, run_world
from tests.gradients.scenarios import SCENARIOS, Plain, Scenario

CLIP = {"max_norm": 0.5, "method": {"type": "zclip", "warmup": 2}}


def _engine(scenario: Scenario, gpc: ParallelContext) -> Any:
    return initialize(
        lambda: scenario.build(gpc), lambda parameters: torch.optim.AdamW(parameters, lr=0.05), context=gpc
    )[0]


def _steps(engine: Any, scenario: Scenario, gpc: ParallelContext, count: int) -> None:
    for _ in range(count):
        engine.zero_grad()
        scenario.run(engine, gpc)
        engine.step()


def train(name: str, folder: Path, before: int, after: int, resume: bool, **options: Any) -> dict[str, Tensor]:
    """Train; save after some steps, or begin by loading."""
    scenario = SCENARIOS[name]
    config = {**scenario.config, **options}
    with launch(config, context=ParallelContext(), verbose=False) as gpc, CheckpointManager(folder, gpc) as manager:
        engine = _engine(scenario, gpc)
        if resume:
            info = manager.load(engine.model, engine.optimizer)
            engine.load_extra_state(info.extra)
        else:
            _steps(engine, scenario, gpc, before)
            manager.save(before, engine.model, engine.optimizer, extra=engine.extra_state())
        _steps(engine, scenario, gpc, after)
        weights = gather_weights(engine.model, gpc)
        engine.close()
        return weights


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if at % 2 else []) for at, name in enumerate(SCENARIOS)]
)
def test_a_resumed_engine_goes_on_to_the_bit(tmp_path, name):
    world, options = SCENARIOS[name].world, {"clip_grad_norm": CLIP}
    through = run_world(world, train, name, tmp_path, 3, 2, False, **options).values
    again = run_world(world, train, name, tmp_path, 3, 2, True, **options).values
    for one, other in zip(through, again, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)


class Disorderly(nn.Module):
    """Its gradients come in another order than its parameters stand, in many rows of fp32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for at in (3, 0, 5, 1, 4, 2):
            x = torch.tanh(self.layers[at](x))
        return x


def disorderly(folder: Path, before: int, after: int, flat: bool | None) -> list[Tensor]:
    """Train with buckets so small that their layout shows; go on from what is in the folder."""
    config = {"clip_grad_norm": 0.01, "sync": {"bucket_mb": 0.05, "shared_memory": flat}, "flat_step": flat}
    with launch(config, context=ParallelContext(), verbose=False) as gpc, CheckpointManager(folder, gpc) as manager:
        engine = initialize(Disorderly(), lambda p: torch.optim.AdamW(p, lr=0.05), nn.MSELoss(), context=gpc)[0]
        start = manager.latest() or 0
        if start:
            engine.load_extra_state(manager.load(engine.model, engine.optimizer).extra)
        norms = []
        for step in range(start, start + before + after):
            torch.manual_seed(step * 10 + gpc.get_global_rank())
            engine.zero_grad()
            engine.backward(engine.criterion(engine(torch.randn(8, 96)), torch.randn(8, 96)))
            engine.step()
            norms.append(engine.grad_norm)
            if step + 1 == before:
                manager.save(before, engine.model, engine.optimizer, extra=engine.extra_state())
        engine.close()
        return [*norms[-after:], *(value.detach().clone() for value in engine.model.parameters())]


@pytest.mark.parametrize("flat", [None, False])
def test_sums_are_taken_in_the_order_of_the_run_that_is_resumed(tmp_path, flat):
    through = run_world(2, disorderly, tmp_path, 3, 3, flat).values
    again = run_world(2, disorderly, tmp_path, 0, 3, flat).values
    for one, other in zip(through, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.slow
def test_the_next_steps_on_another_layout_are_those_of_one_process(tmp_path):
    run_world(4, train, "data 2 x tensor 2", tmp_path, 3, 0, False)
    found = run_world(2, train, "data 2", tmp_path, 0, 2, True).values[0]
    scenario, model = SCENARIOS["data 2"], Plain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with CheckpointManager(tmp_path, ParallelContext()) as manager:
        manager.load(model, optimizer)
    x, y = (torch.cat(column) for column in zip(*(scenario.batch(part) for part in range(2)), strict=True))
    for _ in range(2):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    compare({name: value.detach() for name, value in model.named_parameters()}, found, 1e-12)

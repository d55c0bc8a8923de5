"""An engine that is interrupted and resumed takes the same steps as one that was not, on every layout.

To the bit where all steps are of one kind. A flat step is not: an engine's first step after its start is an ordinary
one (it records the order of gradients), whose rounding differs in the last digit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from colonnade._launch import launch
from colonnade.checkpoint import CheckpointManager
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.testing import compare, gather_weights, run_world
from tests.engine.gradient_handler.scenarios import SCENARIOS, Plain, Scenario

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
            engine.load_clip_state(info.extra["clip"])
        else:
            _steps(engine, scenario, gpc, before)
            manager.save(before, engine.model, engine.optimizer, extra={"clip": engine.clip_state()})
        _steps(engine, scenario, gpc, after)
        weights = gather_weights(engine.model, gpc)
        engine.close()
        return weights


@pytest.mark.parametrize(
    "name", [name if name == "data 2" else pytest.param(name, marks=pytest.mark.slow) for name in SCENARIOS]
)
def test_a_resumed_engine_goes_on_to_the_bit(tmp_path, name):
    world, options = SCENARIOS[name].world, {"clip_grad_norm": CLIP, "flat_step": False}
    through = run_world(world, train, name, tmp_path, 3, 2, False, **options).values
    again = run_world(world, train, name, tmp_path, 3, 2, True, **options).values
    for one, other in zip(through, again, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.slow
def test_a_resumed_engine_with_flat_steps_goes_on(tmp_path):
    through = run_world(2, train, "data 2", tmp_path, 3, 2, False, clip_grad_norm=CLIP).values[0]
    again = run_world(2, train, "data 2", tmp_path, 3, 2, True, clip_grad_norm=CLIP).values[0]
    compare(through, again, 1e-14)


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

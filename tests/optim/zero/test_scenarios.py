"""Every scenario of the gradient handlers, at every stage, ends with the weights and norms of stage 0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.build import initialize
from colonnade.testing import compare, gather_weights, run_world
from tests.engine import test_pipeline
from tests.gradients.scenarios import SCENARIOS

WAYS: list[tuple[int, Any]] = [(0, "auto"), (1, "auto"), (1, False), (2, "auto"), (2, False), (3, "auto")]
EXPERTS_IN_ROOT = ("expert 2 in data 4", "expert 4 in data 4")


def _config(stage: int, shared_memory: Any) -> dict[str, Any]:
    zero = {"stage": stage, **({"bucket_mb": 0.0003} if stage in (1, 2) else {})}
    return {"zero": zero, "sync": {"shared_memory": shared_memory}, "clip_grad_norm": 0.05}


def _train(name: str, ways: list[tuple[int, Any]]) -> list[tuple[dict[str, Tensor], list[float]]]:
    scenario, found = SCENARIOS[name], []
    for way in ways:
        with launch({**scenario.config, **_config(*way)}, context=ParallelContext(), verbose=False) as gpc:
            engine = initialize(
                lambda gpc=gpc: scenario.build(gpc), lambda p: torch.optim.AdamW(p, lr=0.01), context=gpc
            )[0]
            norms = []
            for _ in range(3):
                engine.zero_grad()
                scenario.run(engine, gpc)
                engine.step()
                norms.append(engine.grad_norm.item())
            found.append((gather_weights(engine.model, gpc), norms))
            engine.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if at % 2 else []) for at, name in enumerate(SCENARIOS)]
)
def test_every_scenario(name):
    ways = [way for way in WAYS if way[0] != 3 or name not in EXPERTS_IN_ROOT]
    (truth, norms), *others = run_world(SCENARIOS[name].world, _train, name, ways).values[0]
    for way, (weights, found) in zip(ways[1:], others, strict=True):
        assert found == pytest.approx(norms, rel=1e-10), way
        compare(truth, weights, 1e-10)


def _chunks(stage: int, name: str) -> dict[str, Tensor]:
    """Several stages on a rank: no pass is known to be the last, and all is summed after them."""
    settings, lie = test_pipeline.SCHEDULES[name]
    config = {
        "parallel": {"pipeline": 2},
        "schedule": {"type": name, "num_microbatches": 4, **settings},
        **_config(stage, "auto"),
    }
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        model = test_pipeline.build(gpc, lie, tied=False)
        engine = initialize(model, torch.optim.AdamW(model.parameters(), lr=0.01), nn.MSELoss(), context=gpc)[0]
        for step in range(3):
            engine.zero_grad()
            engine.execute_schedule(iter([test_pipeline.batch(step, gpc.get_local_rank(ParallelMode.DATA), rows=8)]))
            engine.step()
        found = test_pipeline.renamed(gather_weights(model, gpc), False)
        engine.close()
        return found


def _chunks_at_every_stage(name: str) -> list[dict[str, Tensor]]:
    return [_chunks(stage, name) for stage in (0, 1, 2, 3)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["Interleaved1F1B", "ZBV", pytest.param("InterleavedZeroBubble", marks=pytest.mark.long)]
)
def test_chunks_of_a_pipeline(name):
    truth, *others = run_world(4, _chunks_at_every_stage, name).values[0]
    for found in others:
        compare(truth, found, 1e-10)


class _TwoDtypes(nn.Module):
    """Gradients of one dtype come between those of the other, so their buckets take turns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=dtype) for dtype in (torch.float64, torch.float32) * 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)).tanh()
        return x


def _train_two_dtypes() -> list[dict[str, Tensor]]:
    found = []
    for stage in (0, 1, 2):
        with launch({**_config(stage, "auto"), "gradient_accumulation": 2}, context=ParallelContext()) as gpc:
            engine = initialize(_TwoDtypes(), lambda p: torch.optim.AdamW(p, lr=0.01), nn.MSELoss(), context=gpc)[0]
            for step in range(6):
                data = torch.randn(3, 4, generator=torch.Generator().manual_seed(2 * step + gpc.get_global_rank()))
                engine.zero_grad()
                engine.execute_schedule(iter([(data.double(), data)]))
                engine.step()
            found.append(gather_weights(engine.model, gpc))
            engine.close()
    return found


def test_a_model_of_two_dtypes():
    truth, *others = run_world(2, _train_two_dtypes).values[0]
    for weights in others:
        compare(truth, weights, 1e-6)

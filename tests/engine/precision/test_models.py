"""The library's models with half-precision gathers beside tensor, pipeline, expert and sequence parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.build import initialize
from colonnade.parallel.split import split
from colonnade.testing import run_world
from tests.models.grid import MODELS, batch

BF16: dict[str, Any] = {"bf16": True, "zero": 3}
PIPELINE = {"schedule": {"type": "OneFOneB", "num_microbatches": 2}}
CASES: list[tuple[str, dict[str, Any], dict[str, Any], float]] = [
    ("GPT, tied", {"data": 2, "tensor": {"size": 2, "mode": "1d"}}, BF16, 0.01),
    ("GPT, tied", {"data": 2, "pipeline": 2}, {**BF16, **PIPELINE}, 0.01),
    ("GPT", {"data": 2, "sequence": 2}, BF16, 0.01),
    ("MoE-GPT", {"expert": 2}, BF16, 0.01),
    ("MoE-GPT", {"expert": 2}, {"zero": 3}, 1e-4),
]


def _losses(engine: Any, model: str, steps: int, gpc: ParallelContext) -> list[float]:
    """Of the whole batch."""
    found = []
    for step in range(steps):
        x, y = batch(model, gpc.get_local_rank(ParallelMode.DATA), step)
        engine.zero_grad()
        loss = engine.execute_schedule(iter([(x.float() if x.is_floating_point() else x, y)]))[2].double()
        engine.step()
        dist.all_reduce(loss)
        found.append(loss.item() / gpc.world_size)
    return found


def _one_process(model: str, steps: int, ranks: int) -> list[float]:
    """The same in fp64."""
    torch.manual_seed(0)
    plain: Any = MODELS[model](context=ParallelContext()).double()
    optimizer, found = torch.optim.AdamW(plain.parameters(), lr=0.01), []
    for step in range(steps):
        x, y = (torch.cat(part) for part in zip(*(batch(model, rank, step) for rank in range(ranks)), strict=True))
        out = plain(x)
        loss = plain.criterion()(*(out if isinstance(out, tuple) else (out,)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def _trained(steps: int = 3) -> None:
    for model, parallel, more, tolerance in CASES:
        with launch({"parallel": parallel, **more}, context=ParallelContext(), verbose=False) as gpc:
            torch.manual_seed(0)
            whole: Any = MODELS[model](context=gpc)
            stages = split(whole, num_stages=2) if "pipeline" in parallel else whole
            engine = initialize(stages, lambda p: torch.optim.AdamW(p, lr=0.01), whole.criterion(), context=gpc)[0]
            found, truth = _losses(engine, model, steps, gpc), _one_process(model, steps, gpc.data_parallel_size)
            assert found == pytest.approx(truth, rel=tolerance), (model, parallel, more)
            engine.close()


@pytest.mark.slow
def test_models_in_mixed_precision_at_stage_3_stay_near_one_process_in_fp64():
    run_world(4, _trained, timeout=180, env={"TORCH_DISTRIBUTED_DEBUG": "OFF"})

"""Plans for the tests of the report, made by the planner."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from colonnade.config import load_config
from colonnade.context.parallel_context import ParallelContext
from colonnade.planner.clock import load_hardware
from colonnade.planner.job import Job
from colonnade.planner.plan import plan

CONFIG = {
    "parallel": {"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}},
    "schedule": {"type": "OneFOneB", "num_microbatches": 4},
}


@cache
def small_plan() -> dict[str, Any]:
    """8 ranks: data 2 x pipeline 2 x tensor 2."""
    job = Job(_build, lambda: (torch.randn(8, 16), torch.zeros(8, dtype=torch.long)), lambda: nn.CrossEntropyLoss())
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.OFF)  # the wrapper of DETAIL cannot be put around a fake world
    try:
        return plan(load_config(CONFIG), 8, load_hardware("h100"), job, ParallelContext()).to_dict()
    finally:
        dist.set_debug_level(level)


@cache
def groups_of_a_hundred_thousand() -> dict[str, Any]:
    """102,400 ranks without a model."""
    parallel = {"pipeline": 16, "tensor": {"size": 8, "mode": "1d"}, "expert": 8}
    return plan(
        load_config({"parallel": parallel}), 102_400, load_hardware("h100"), context=ParallelContext()
    ).to_dict()


def _build() -> Any:
    import colonnade
    from colonnade.nn import Linear

    return colonnade.split(
        nn.Sequential(Linear(16, 32), nn.ReLU(), Linear(32, 16, split="row"), nn.Linear(16, 10)), num_stages=2
    )

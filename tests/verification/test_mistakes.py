"""Every known mistake, planted into real runs, is noticed by verify and called by its name."""

from __future__ import annotations

from typing import Any

import torch

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.build import initialize
from colonnade.parallel.split import split
from colonnade.verification.api import verify
from colonnade.verification.mistakes import MISTAKES, NotHere, plant
from tests.models.grid import MODELS, batch

LAYOUTS: dict[str, tuple[int, tuple[Any, ...]]] = {
    "data and tensor": (4, ("GPT", {"data": 2, "tensor": {"size": 2, "mode": "1d"}}, {"gradient_accumulation": 3})),
    "pipeline": (2, ("GPT, tied", {"pipeline": 2}, {"schedule": {"type": "OneFOneB", "num_microbatches": 2}})),
    "zero": (2, ("GPT", {"data": 2}, {"zero": {"stage": 2}})),
}


def named(model: str, parallel: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """On each rank: what verify says of each mistake, (causes, first sentence); None where it has no place."""
    found: dict[str, Any] = {}
    config = {"parallel": parallel, "clip_grad_norm": 0.1, **settings}
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        for name in MISTAKES:
            torch.manual_seed(0)
            whole = MODELS[model](context=gpc).double()
            stages = gpc.pipeline_parallel_size
            engine, *_ = initialize(
                split(whole, num_stages=stages) if stages > 1 else whole,
                lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-6),
                whole.criterion(),
                context=gpc,
            )
            try:
                plant(engine, name)
            except NotHere:
                found[name] = (None, "")
                continue
            mine = gpc.get_local_rank(ParallelMode.DATA)
            batches = [[batch(model, 10 * at + mine, step) for at in range(engine.accumulation)] for step in range(2)]
            report = verify(engine, lambda: MODELS[model](context=gpc).double(), batches)
            found[name] = (report.causes, report.findings[0].sentence if report.findings else "")
            engine.close()
    return found

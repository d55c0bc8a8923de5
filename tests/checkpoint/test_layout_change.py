"""One run over four layouts: the same weights to the bit after each change, and the gradients of one process next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade._launch import launch
from colonnade.checkpoint import CheckpointManager
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.build import initialize
from colonnade.testing import compare, gather_gradients, gather_weights, run_world
from tests.engine.test_pipeline import Stage, all_parts, batch, build, renamed

LAYOUTS: list[tuple[int, dict[str, int]]] = [
    (4, {"data": 4}),
    (4, {"tensor": 2, "pipeline": 2}),
    (2, {"data": 2}),
    (1, {}),
]


def leg(parallel: dict[str, int], folder: Path, steps: int) -> dict[str, Any]:
    """Load what is there, take steps on this layout, save; what was loaded, the gradients next, what was saved."""
    config = {"parallel": parallel, "clip_grad_norm": 1.0, "num_microbatches": 4}
    with launch(config, context=ParallelContext(), verbose=False) as gpc, CheckpointManager(folder, gpc) as manager:
        piped = parallel.get("pipeline", 1) > 1
        model = build(gpc, "loop1", True) if piped else Stage(all_parts(gpc, True))
        engine = initialize(model, lambda p: torch.optim.AdamW(p, lr=0.01), nn.MSELoss(), context=gpc)[0]
        start = manager.latest() or 0
        if start:
            engine.load_extra_state(manager.load(model, engine.optimizer).extra)
        loaded, gradients = renamed(gather_weights(model, gpc), True), {}
        for step in range(start, start + steps):
            engine.zero_grad()
            engine.execute_schedule(iter([rows(step, gpc)]))
            engine._sum_gradients()
            gradients = gradients or renamed(gather_gradients(model, gpc), True)
            engine.step()
        manager.save(start + steps, model, engine.optimizer, extra=engine.extra_state())
        saved = renamed(gather_weights(model, gpc), True)
        engine.close()
        return {"loaded": loaded, "gradients": gradients, "saved": saved}


def rows(step: int, gpc: ParallelContext) -> tuple[Tensor, Tensor]:
    """This rank's part of the batch of 8 rows that every layout shares out."""
    size, at = gpc.data_parallel_size, gpc.get_local_rank(ParallelMode.DATA) if gpc.data_parallel_size > 1 else 0
    return tuple(part.chunk(size)[at] for part in batch(step, 0, rows=8))  # type: ignore[return-value]


def test_weights_go_through_four_layouts_to_the_bit_and_the_next_gradients_are_those_of_one_process(tmp_path):
    before: dict[str, Tensor] | None = None
    for at, (world, parallel) in enumerate(LAYOUTS):
        found = run_world(world, leg, parallel, tmp_path, 2).values[0]
        if before is not None:
            assert found["loaded"].keys() == before.keys()
            assert all(torch.equal(found["loaded"][name], before[name]) for name in before)
        plain = Stage(all_parts(None, True))
        with torch.no_grad():
            for name, value in plain.named_parameters():
                value.copy_(found["loaded"][name])
        x, y = batch(2 * at, 0, rows=8)
        F.mse_loss(plain(x), y).backward()
        compare({name: value.grad for name, value in plain.named_parameters()}, found["gradients"], 1e-10)
        before = found["saved"]

"""Training steps under ZeRO on two gloo ranks, compared with torch's own sharding.

Stages 1 and 2 against DDP with torch's ZeroRedundancyOptimizer, stage 3 against FSDP2 used by hand; AdamW, fused.
`python benchmarks/zero.py --json` prints one object last: `ratios` of Colonnade's time to the other's in the same run,
interleaved, medians; and the `goals`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _measure import interleave, report
from _models import GPT
from _worlds import World, timer, turn
from torch import Tensor, nn

from colonnade import initialize, launch
from colonnade.context.parallel_context import ParallelContext

RANKS = 2
GOALS = {"stage1": 0.90, "stage2": 0.90, "stage3": 1.02}
LR = 1e-3


def _model() -> tuple[nn.Module, Callable[[Any], Tensor]]:
    torch.manual_seed(0)
    model = GPT()
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(0, 4096, (4, 64), generator=generator)
    return model, lambda net: F.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten())


def ours(stage: int) -> Callable[[str], float]:
    """The engine's loop; only the config names ZeRO."""
    gpc = launch({"zero": {"stage": stage}}, context=ParallelContext(), verbose=False)
    model, loss = _model()
    engine, *_ = initialize(model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True), context=gpc)

    def step() -> None:
        engine.zero_grad()
        engine.backward(loss(engine))
        engine.step()

    return timer(step)


def redundancy() -> Callable[[str], float]:
    """DDP, and torch's ZeroRedundancyOptimizer at its fastest."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model, loss = _model()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=LR, fused=True
    )

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss(wrapped).backward()
        optimizer.step()

    return timer(step)


def fsdp() -> Callable[[str], float]:
    """FSDP2 by hand: each block, then the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, loss = _model()
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss(model).backward()
        optimizer.step()

    return timer(step)


CONTESTS: dict[str, tuple[tuple[Any, ...], Callable[..., Any]]] = {
    "stage1": ((ours, 1), redundancy),
    "stage2": ((ours, 2), redundancy),
    "stage3": ((ours, 3), fsdp),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--case", choices=list(CONTESTS), action="append")
    arguments = parser.parse_args()
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "OFF"  # DDP does not survive DETAIL on a CPU
    ratios, seconds = {}, {}
    for case in arguments.case or CONTESTS:
        mine, theirs = CONTESTS[case]
        worlds = {"ours": World(RANKS, *mine), "theirs": World(RANKS, theirs)}
        turns = {name: turn(world.ready()) for name, world in worlds.items()}
        interleave(turns, 6)
        medians = interleave(turns, arguments.rounds)
        ratios[case] = medians["ours"] / medians["theirs"]
        seconds[case] = {name: round(median, 4) for name, median in medians.items()}
        for world in worlds.values():
            world.close()
    goals = {case: goal for case, goal in GOALS.items() if case in ratios}
    return 0 if report(ratios, goals, arguments.json, seconds=seconds) else 1


if __name__ == "__main__":
    sys.exit(main())

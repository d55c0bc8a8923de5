"""Time of Colonnade's layers divided by the time of the same layers written with torch: medians of interleaved runs.

`python benchmarks/layers.py --json` prints one object last: `ratios` of Colonnade's time to the other's, and the `goals`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from _measure import interleave, report
from _worlds import World, turn
from torch import nn
from torch.nn import functional as F

from colonnade import ParallelMode, launch
from colonnade.context.parallel_context import ParallelContext

Serve = Callable[[], Callable[[str], float]]
Contest = tuple[int, Serve, Serve, float]
"""(ranks, ours, theirs, goal)"""

WIDTH, INNER, ROWS = 512, 2048, 256


def linear1d() -> Contest:
    """A column and a row weight over two ranks, forward and backward; theirs is DTensor's `parallelize_module`."""
    return 2, linear1d_ours, linear1d_dtensor, 1.05


def linear1d_ours() -> Callable[[str], float]:
    from colonnade.nn import Linear, arrange

    here = arrange(_two_ranks())
    torch.manual_seed(0)
    up = Linear(WIDTH, INNER, arrangement=here)
    down = Linear(INNER, WIDTH, split="row", arrangement=here)
    return _passes(nn.Sequential(up, nn.GELU(), down))


def linear1d_dtensor() -> Callable[[str], float]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return _passes(parallelize_module(model, _two_ranks().device_mesh(ParallelMode.TENSOR), plan))


def _two_ranks() -> ParallelContext:
    config = {"parallel": {"tensor": {"size": 2, "mode": "1d"}}}
    return launch(config, context=ParallelContext(), verbose=False)


def _passes(model: nn.Module) -> Callable[[str], float]:
    """Forward and backward, the gradient of the input included."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)).requires_grad_()
    target = torch.zeros(ROWS, WIDTH)

    def step(command: str) -> float:
        model.zero_grad(set_to_none=True)
        x.grad = None
        dist.barrier()
        begin = time.perf_counter()
        F.mse_loss(model(x), target).backward()
        return time.perf_counter() - begin

    return step


def moe() -> Contest:
    """Experts over two ranks; theirs is written by hand with all_to_all_single."""
    import _layers_moe

    return _layers_moe.RANKS, _layers_moe.ours, _layers_moe.by_hand, _layers_moe.GOAL


def contests() -> dict[str, Callable[[], Contest]]:
    """Every case by name."""
    return {"linear1d": linear1d, "moe": moe}


def measure(contest: Contest, rounds: int) -> float:
    """Ours over theirs: the slowest rank of each, medians of turns."""
    size, ours, theirs, _ = contest
    worlds = {"ours": World(size, ours), "theirs": World(size, theirs)}
    turns = {name: turn(world.ready()) for name, world in worlds.items()}
    interleave(turns, 6)
    medians = interleave(turns, rounds)
    for world in worlds.values():
        world.close()
    return medians["ours"] / medians["theirs"]


def main() -> int:
    known = contests()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--case", choices=list(known), action="append")
    arguments = parser.parse_args()
    ratios: dict[str, float] = {}
    goals: dict[str, float] = {}
    for case in arguments.case or known:
        contest: Any = known[case]()
        ratios[case], goals[case] = measure(contest, arguments.rounds), contest[3]
    return 0 if report(ratios, goals, arguments.json) else 1


if __name__ == "__main__":
    sys.exit(main())

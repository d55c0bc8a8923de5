"""What the engine costs: a training loop over a hand-written one, and our 1F1B over torch's own pipelining.

`python benchmarks/engine.py --json` prints one object last: `ratios` of Colonnade's time to the hand-written one's
in the same run, interleaved, medians; and the `goals`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _measure import interleave, report
from _models import GPT, Block
from _worlds import World, timer, turn
from torch import Tensor, nn

from colonnade import initialize, launch
from colonnade.context.parallel_context import ParallelContext

GOALS = {"engine": 1.02, "pipeline": 1.02}
MICRO_BATCHES, WIDTH, ROWS, LENGTH = 8, 256, 16, 64


def by_hand() -> Callable[[str], float]:
    """The loop a person would write with torch alone: fused AdamW, clip, step."""
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens = torch.randint(0, 4096, (4, 64))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return timer(step)


def by_engine() -> Callable[[str], float]:
    """The same through the engine."""
    torch.manual_seed(0)
    model = GPT()
    gpc = launch({"clip_grad_norm": 1.0}, context=ParallelContext(), verbose=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    engine, *_ = initialize(model, optimizer, context=gpc)
    tokens = torch.randint(0, 4096, (4, 64))

    def step() -> None:
        engine.zero_grad()
        engine.backward(F.cross_entropy(engine(tokens).flatten(0, 1), tokens.flatten()))
        engine.step()

    return timer(step)


def stage() -> nn.Module:
    torch.manual_seed(dist.get_rank())
    return nn.Sequential(*(Block(WIDTH, 8) for _ in range(3)))


def torch_pipeline() -> Callable[[str], float]:
    """torch.distributed.pipelining used by hand: forward, backward and the loss of one step."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    module = stage()
    piped = PipelineStage(module, dist.get_rank(), 2, torch.device("cpu"))
    schedule = Schedule1F1B(piped, MICRO_BATCHES, loss_fn=F.mse_loss)
    x, y = _batch()

    def step() -> None:
        module.zero_grad(set_to_none=True)
        if dist.get_rank() == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=[])

    return timer(step)


def our_pipeline() -> Callable[[str], float]:
    """The same through our schedule."""
    schedule = {"type": "OneFOneB", "num_microbatches": MICRO_BATCHES, "loss_everywhere": False}
    gpc = launch(
        {"parallel": {"pipeline": 2}, "schedule": schedule, "compare_stages": False},
        context=ParallelContext(),
        verbose=False,
    )
    module = stage()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    engine, *_ = initialize(module, optimizer, F.mse_loss, context=gpc)
    batch = _batch()

    def step() -> None:
        engine.zero_grad()
        engine.execute_schedule(iter([batch]), return_output_label=False)
        engine._sum_gradients()  # without it the engine would record the order of gradients for ever, as in a first step
        engine._end_step()

    return timer(step)


def _batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(ROWS, LENGTH, WIDTH, generator=generator) for _ in range(2))  # type: ignore[return-value]


CONTESTS: dict[str, tuple[int, Callable[..., Any], Callable[..., Any]]] = {
    "engine": (1, by_engine, by_hand),
    "pipeline": (2, our_pipeline, torch_pipeline),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--case", choices=list(CONTESTS), action="append")
    arguments = parser.parse_args()
    ratios = {}
    for case in arguments.case or CONTESTS:
        size, ours, theirs = CONTESTS[case]
        worlds = {"ours": World(size, ours), "theirs": World(size, theirs)}
        turns = {name: turn(world.ready()) for name, world in worlds.items()}
        interleave(turns, 6)
        medians = interleave(turns, arguments.rounds)
        ratios[case] = medians["ours"] / medians["theirs"]
        for world in worlds.values():
            world.close()
    goals = {case: goal for case, goal in GOALS.items() if case in ratios}
    return 0 if report(ratios, goals, arguments.json) else 1


if __name__ == "__main__":
    sys.exit(main())

"""What the guard costs: a run with `guard=dict(every=100)` to the same run without it.

`python benchmarks/guard.py --json` prints one object last: `ratios` and `goals`. In one run of two ranks, steps with and
without the guard take turns; its comparisons, which come once in 100 steps, are timed by themselves and shared out over as
many steps. `cpu` has the same ratios in seconds of the processor, which other programs on the machine change less. `own` has what
the guard's own functions take of the processor, to a step without it: on a crowded machine, where two steps differ by more
than the guard costs, it is the figure to read. `planned`: gradients are summed by the built-in handler. `by_hand`: by one
that calls all_reduce for each parameter, each of which is noted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _measure import report
from _models import GPT
from _worlds import World

from colonnade import initialize, launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.gradient_handler import BaseGradientHandler
from colonnade.engine.guard import EVERY
from colonnade.registry import GRADIENT_HANDLER

GOALS = {"planned": 1.01, "by_hand": 1.01}
RANKS = 2


@GRADIENT_HANDLER.register_module
class EachByHand(BaseGradientHandler):
    """The handler that a person would write first."""

    def handle_gradient(self) -> None:
        for parameter in self._model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= RANKS


Taken = tuple[float, float, float]
"""Seconds by the clock, of the processor, and of the processor inside the guard."""


class Meter:
    """The processor's seconds inside some methods."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - begin

        return call


def contest(by_hand: bool) -> Callable[[str], Taken]:
    """Answers "plain" and "guarded" with what a step takes, "check" with what a comparison does."""
    torch.manual_seed(0)
    handlers = {"gradient_handler": ["EachByHand"]} if by_hand else {}
    config: dict[str, Any] = {"guard": {"every": 10**9}, "clip_grad_norm": 1.0, **handlers}
    gpc = launch(config, context=ParallelContext(), verbose=False)
    engine, *_ = initialize(GPT(), lambda p: torch.optim.AdamW(p, lr=1e-3), context=gpc)
    watch, sync = engine._watch, engine._sync
    guard, log = watch._guard, sync.log
    assert guard is not None
    meter = Meter()
    log._note, log.end_step = meter.around(log._note), meter.around(log.end_step)
    compare = meter.around(guard.check)
    tokens = torch.randint(0, 4096, (4, 64), generator=torch.Generator().manual_seed(dist.get_rank()))

    def step(guarded: bool) -> Taken:
        watch._guard, sync.log = (guard, log) if guarded else (None, None)

        def work() -> None:
            engine.zero_grad()
            engine.backward(F.cross_entropy(engine(tokens).flatten(0, 1), tokens.flatten()))
            engine.step()

        return timed(work, meter)

    acts = {"plain": lambda: step(False), "guarded": lambda: step(True), "check": lambda: timed(compare, meter)}
    return lambda command: acts[command]()


def timed(work: Callable[[], None], meter: Meter) -> Taken:
    """All ranks begin together."""
    dist.barrier()
    meter.seconds = 0.0
    begin, busy = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - begin, time.process_time() - busy, meter.seconds


def measure(by_hand: bool, rounds: int) -> list[dict[str, float]]:
    """Medians of the slower rank, of each of what is taken: a step, what the guard adds to it, a comparison."""
    world = World(RANKS, contest, by_hand).ready()
    times: dict[str, list[Taken]] = {"plain": [], "guarded": [], "check": []}
    for turn in range(-3, rounds):
        pair = ("plain", "guarded") if turn % 2 else ("guarded", "plain")
        for name in ("check", "", *pair):
            taken = world.ask(name or "plain")  # a step between, since a comparison leaves other memory in the caches
            if turn >= 0 and name:
                times[name].append(tuple(max(each) for each in zip(*taken, strict=True)))
    world.close()
    found = []
    for kind in range(3):
        plain, guarded, check = ([taken[kind] for taken in times[name]] for name in ("plain", "guarded", "check"))
        added = statistics.median(a - b for a, b in zip(guarded, plain, strict=True))
        found.append({"step": statistics.median(plain), "added": added, "check": statistics.median(check)})
    found[2]["step"] = found[1]["step"]
    return found


def ratio(found: dict[str, float]) -> float:
    """A step with its share of a comparison, to one without."""
    return 1 + (found["added"] + found["check"] / EVERY) / found["step"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--case", choices=list(GOALS), action="append")
    arguments = parser.parse_args()
    ratios, cpu, own, more = {}, {}, {}, {}
    for case in arguments.case or GOALS:
        clock, processor, inside = measure(case == "by_hand", arguments.rounds)
        ratios[case] = ratio(clock)
        cpu[case], own[case] = round(ratio(processor), 4), round(ratio(inside), 4)
        more[case] = {name: round(1000 * value, 3) for name, value in clock.items()}
    return 0 if report(ratios, {case: GOALS[case] for case in ratios}, arguments.json, cpu=cpu, own=own, ms=more) else 1


if __name__ == "__main__":
    sys.exit(main())

"""The cost of the trainer: with five hooks and a progress bar, compared with a hand-written loop; and during a
background save.

`python benchmarks/trainer.py --json` prints one object last: `ratios`, medians over turns that are interleaved in
one run, and the `goals`. `trainer` is the time of steps in `fit` to that of the same steps by hand; `save` the time of
the steps from the start of a background save until it is written, to that of as many without; `saves` says how many
those are and what one save adds to them.
"""

from __future__ import annotations

import argparse
import io
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _measure import interleave, report
from _models import GPT
from _worlds import World, timer, turn
from torch import Tensor

from colonnade import initialize, launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.trainer import BaseHook, Trainer, hooks
from colonnade.trainer.hooks import ProgressHook

GOALS = {"trainer": 1.02, "save": 1.10}
STEPS = 10
PERIOD = 30
"""Steps from one save to the next; the last third of them is without a save."""


class Terminal(io.StringIO):
    """Takes a bar for a screen."""

    def isatty(self) -> bool:
        return True


def by_hand() -> Callable[[str], float]:
    """The loop a person would write with torch alone: fused AdamW, clip, step, scheduler."""
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10_000)
    batches = _batches()

    def epoch() -> None:
        for x, y in batches:
            optimizer.zero_grad(set_to_none=True)
            _loss(model(x), y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()

    return timer(epoch)


def by_trainer() -> Callable[[str], float]:
    """The same through the trainer, which also measures, logs and draws."""
    trainer, scheduler = _trainer()
    batches = _batches()
    folder = Path(tempfile.mkdtemp())
    screen = Terminal()

    def epoch() -> None:
        watching: list[Any] = [
            hooks.LossHook(),
            hooks.LRSchedulerHook(scheduler, by_epoch=False),
            hooks.ThroughputHook(),
            hooks.GradientNormHook(),
            hooks.JsonlHook(
                folder / f"{trainer.cur_epoch}.jsonl", report=False
            ),  # a page is made once a run, not in a step
            ProgressHook(screen),
        ]
        trainer.fit(batches, epochs=trainer.cur_epoch + 1, hooks=watching)

    return timer(epoch)


class Stamps(BaseHook):
    """Notes when each step ended, before it is saved, and whether a save was being written then."""

    def __init__(self, save: hooks.SaveCheckpointHook) -> None:
        super().__init__(priority=50)
        self._save = save
        self.times: list[float] = []
        self.busy: list[bool] = []

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        pending = self._save._manager._pending if self._save._manager is not None else None
        self.busy.append(pending is not None and pending.is_writing)
        self.times.append(time.perf_counter())


def saving(turns: int) -> Callable[[str], dict[str, float]]:
    """Measure steps during a save, and steps without a save, in turns in one run."""
    trainer, _ = _trainer()
    with tempfile.TemporaryDirectory() as folder:
        save = hooks.SaveCheckpointHook(PERIOD, folder, by_epoch=False, background=True, keep=1)
        stamps = Stamps(save)
        trainer.fit(_batches(), max_steps=PERIOD * (turns + 1), hooks=[stamps, save])
    times, ratios, steps, writing = stamps.times, [], [], []
    for begin in range(PERIOD - 1, len(times) - PERIOD, PERIOD):
        # The step that is under way when the last byte is written counts as beside it.
        beside = 1 + sum(stamps.busy[begin + 1 : begin + PERIOD])
        quiet = begin + 2 * PERIOD // 3
        assert beside <= 2 * PERIOD // 3, "a save takes longer than the steps it is given: raise PERIOD"
        alone = (times[begin + PERIOD] - times[quiet]) / (begin + PERIOD - quiet)
        ratios.append((times[begin + beside] - times[begin]) / beside / alone)
        steps.append(alone)
        writing.append(beside)
    ratio, step, count = (statistics.median(values) for values in (ratios, steps, writing))
    told = {
        "ratio": ratio,
        "step_ms": 1000 * step,
        "added_by_a_save_ms": 1000 * step * count * (ratio - 1),
        "steps_while_it_is_written": count,
    }
    return lambda command: told


def _trainer() -> tuple[Trainer, Any]:
    torch.manual_seed(0)
    model = GPT()
    gpc = launch({"clip_grad_norm": 1.0}, context=ParallelContext(), verbose=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10_000)
    engine, *_ = initialize(model, optimizer, _loss, context=gpc)
    return Trainer(engine), scheduler


def _loss(output: Tensor, label: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), label.flatten())


def _batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randint(0, 4096, (4, 64), generator=generator) for _ in range(STEPS)]
    return [(tokens, tokens) for tokens in made]


def _contest(rounds: int) -> float:
    worlds = {"ours": World(1, by_trainer), "theirs": World(1, by_hand)}
    turns = {name: turn(world.ready()) for name, world in worlds.items()}
    interleave(turns, 2)
    medians = interleave(turns, rounds)
    for world in worlds.values():
        world.close()
    return medians["ours"] / medians["theirs"]


def _beside_a_save(turns: int) -> dict[str, float]:
    world = World(1, saving, turns).ready()
    (told,) = world.ask("ratio")
    world.close()
    return {name: round(value, 4) for name, value in told.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--case", choices=list(GOALS), action="append")
    arguments = parser.parse_args()
    cases = arguments.case or list(GOALS)
    ratios, more = {}, {}
    if "trainer" in cases:
        ratios["trainer"] = _contest(arguments.rounds)
    if "save" in cases:
        more["saves"] = _beside_a_save(arguments.rounds // 2)
        ratios["save"] = more["saves"].pop("ratio")
    return 0 if report(ratios, {case: GOALS[case] for case in ratios}, arguments.json, **more) else 1


if __name__ == "__main__":
    sys.exit(main())

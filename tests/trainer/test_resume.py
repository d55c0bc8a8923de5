"""A run that is killed and resumed in the middle of an epoch gives the weights of one that was not, to the bit."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import HookError
from colonnade.testing import run_world
from colonnade.trainer import BaseHook, StepRecord, Trainer
from colonnade.trainer.data import EpochPosition, Feed
from colonnade.trainer.hooks import (
    AccuracyHook,
    CsvHook,
    EarlyStopHook,
    JsonlHook,
    LoadCheckpointHook,
    LossHook,
    LRSchedulerHook,
    SaveCheckpointHook,
    StopOnSignal,
)
from colonnade.utils import get_dataloader
from tests.trainer.runs import PIPELINE, dataset, make_trainer, samples

COUNT, STEPS = 40, 14
"""In batches of 4 on two ranks: 5 steps an epoch; on one rank 10."""


class Kill(BaseHook):
    """Sends a signal to this process when a step has been made."""

    def __init__(self, step: int, number: int, rank: int = 0) -> None:
        super().__init__(priority=500)
        self._step, self._number, self._rank = step, number, rank

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        if trainer.cur_step == self._step and trainer.context.get_global_rank() == self._rank:
            os.kill(os.getpid(), self._number)


class Steps(BaseHook):
    """Remembers which steps have been told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[int] = []

    def on_record(self, trainer: Trainer, record: StepRecord) -> None:
        self.told.append(record.step)

    def state_dict(self) -> dict[str, Any]:
        return {"told": self.told}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.told = state["told"]


def loader_of(kind: str, trainer: Trainer) -> Any:
    data = dataset(COUNT)
    if kind == "plain":  # shuffles by torch's own random stream
        return DataLoader(data, batch_size=4, shuffle=True)
    if kind == "workers":
        return get_dataloader(data, True, context=trainer.context, batch_size=4, num_workers=2)
    return get_dataloader(data, True, context=trainer.context, batch_size=4)


def train(folder: Path, config: dict[str, Any], kind: str, save: int, kill: tuple[int, int, int] | None) -> Any:
    """Train with everything that has a state; save into `folder` and go on from what is there."""
    config = {"clip_grad_norm": 0.1, **config}
    trainer = make_trainer(config, lr=0.05, dropout=0.3, optimizer=torch.optim.AdamW)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(trainer.engine.optimizer, STEPS)
    steps = Steps()
    hooks = [
        LoadCheckpointHook(folder / "steps"),
        steps,
        LossHook(),
        AccuracyHook(),
        LRSchedulerHook(scheduler, by_epoch=False),
        EarlyStopHook(patience=50),
        JsonlHook(folder / "log.jsonl", report=False),
        CsvHook(folder / "log.csv"),
        SaveCheckpointHook(save, folder / "steps", by_epoch=False, background=kind == "background"),
        StopOnSignal(),
        *([Kill(*kill)] if kill else []),
    ]
    loader = loader_of(kind, trainer)
    trainer.fit(loader, epochs=9, max_steps=STEPS, test_dataloader=loader_of("test", trainer), hooks=hooks)
    metrics = {
        f"{part} {name}": metric.get_accumulated_value()
        for part in ("train", "test")
        for name, metric in trainer.states["metrics"][part].items()
    }
    weights = {name: value.detach().clone() for name, value in trainer.engine.model.state_dict().items()}
    return weights, metrics, steps.told, trainer.cur_epoch


def assert_same(one: Any, other: Any) -> None:
    assert one[0].keys() == other[0].keys()
    assert all(torch.equal(one[0][name], other[0][name]) for name in one[0])
    assert one[1] == pytest.approx(other[1], rel=1e-12)
    assert one[2:] == other[2:]


def steps_of(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step"]


def untimed(line: dict[str, Any]) -> dict[str, Any]:
    """What two runs have in common, to the bit."""
    return {name: value for name, value in line.items() if not name.startswith(("seconds", "time/", "busy/", "memory"))}


CASES: dict[str, tuple[int, dict[str, Any], str, int, int]] = {
    # name: (ranks, config, loader, saved every, killed after)
    "one": (1, {}, "ours", 2, 5),
    "one, plain loader": (1, {}, "plain", 3, 11),
    "one, at the end of an epoch": (1, {}, "ours", 5, 12),
    "one, background": (1, {}, "background", 2, 7),
    "one, accumulation": (1, {"gradient_accumulation": 2}, "plain", 3, 4),
    "data 2": (2, {}, "ours", 2, 5),
    "data 2, workers": (2, {}, "workers", 3, 8),
    "pipeline 2": (2, PIPELINE, "ours", 4, 6),
}


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("one", "data 2")
        else pytest.param(name, marks=pytest.mark.long if "workers" in name else pytest.mark.slow)
        for name in CASES
    ],
)
def test_a_killed_run_resumes_to_the_bit(tmp_path, name):
    ranks, config, kind, save, kill = CASES[name]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    through = run_world(ranks, train, whole, config, kind, save, None).values
    dead = run_world(ranks, train, broken, config, kind, save, (kill, signal.SIGKILL, ranks - 1), check=False)
    assert not dead.ok
    again = run_world(ranks, train, broken, config, kind, save, None).values
    for one, other in zip(through, again, strict=True):
        assert_same(one, other)
    assert through[0][2] == list(range(1, STEPS + 1))
    for one, other in zip(steps_of(whole), steps_of(broken), strict=True):
        assert untimed(one) == untimed(other)
    rows = [line.split(",") for line in (broken / "log.csv").read_text().splitlines()]
    assert [row[0] for row in rows] == ["step", *map(str, range(1, STEPS + 1))]


def test_lines_of_an_epoch_are_there_once(tmp_path):
    run_world(1, train, tmp_path, {}, "ours", 10, (13, signal.SIGKILL, 0), check=False)
    before = (tmp_path / "log.jsonl").read_text()
    (tmp_path / "log.jsonl").write_text(before + '{"kind": "step", "st')  # a line that was being written
    run_world(1, train, tmp_path, {}, "ours", 10, None)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [(line["step"], line["made_again"]) for line in lines if line["kind"] == "run"] == [(0, 0), (10, 3)]
    assert [(line["kind"], line["epoch"]) for line in lines if line["kind"] in ("train", "test")] == [
        ("train", 0),
        ("test", 0),
        ("train", 1),
        ("test", 1),
    ]
    assert [line["step"] for line in steps_of(tmp_path)] == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_another_number_of_ranks_goes_on_after_as_many_samples(tmp_path):
    run_world(2, train, tmp_path, {}, "ours", 3, (4, signal.SIGKILL, 0), check=False)
    told = run_world(1, train, tmp_path, {}, "ours", 3, None).values[0][2]
    assert told == list(range(1, STEPS + 1))
    # Saved after 24 of 40 samples: 4 steps of 4 are left of the epoch, not 2 of 8.
    assert [line["epoch"] for line in steps_of(tmp_path)] == [0] * 3 + [0] * 4 + [1] * 7
    assert sum(line["samples"] for line in steps_of(tmp_path) if line["epoch"] == 0) == COUNT


def taken(state: EpochPosition | None, count: int) -> tuple[list[int], EpochPosition]:
    """The samples of `count` batches, from the start of epoch 1 or after `state`."""
    gpc = launch({}, context=ParallelContext(), verbose=False)
    loader = get_dataloader(TensorDataset(torch.arange(COUNT)), True, context=gpc, batch_size=4)
    feed = Feed(loader, gpc)
    place = feed.load_state_dict(state, None) if state else EpochPosition()
    batches = list(islice(feed.open(1, place), count))
    return [int(sample) for (batch,) in batches for sample in batch], feed.after(place, count)


@pytest.mark.parametrize(("before", "batches", "after"), [(2, 3, 4), (4, 2, 2)])
def test_no_sample_is_lost_or_seen_twice_on_another_number_of_ranks(before, batches, after):
    first = run_world(before, taken, None, batches).values
    rest = run_world(after, taken, first[0][1], 99).values
    seen = [sample for samples, _ in [*first, *rest] for sample in samples]
    assert sorted(seen) == list(range(COUNT))


class Seen(TensorDataset):
    """Remembers which samples were read."""

    def __init__(self, count: int) -> None:
        super().__init__(*samples(count))
        self.read: list[int] = []

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return super().__getitem__(index)


def epoch_in_parts(folder: Path, parts: list[tuple[int, int, int]]) -> list[list[int]]:
    """The samples that each part of an epoch learnt from; a part is (accumulation, size of a batch, last step)."""
    read = []
    for accumulation, size, last in parts:
        trainer = make_trainer({"gradient_accumulation": accumulation})
        data = Seen(COUNT)
        hooks = [LoadCheckpointHook(folder), SaveCheckpointHook(100, folder, by_epoch=False)]
        loader = get_dataloader(data, True, context=trainer.context, batch_size=size)
        trainer.fit(loader, epochs=1, max_steps=last, hooks=hooks)
        assert trainer.engine._passes == 0
        trainer.engine.close()
        trainer.context.destroy()
        read.append(data.read)
    return read


def test_another_batch_or_accumulation_goes_on_after_as_many_samples(tmp_path):
    cases = {
        "a larger batch": [(1, 4, 3), (1, 32, 99)],
        "more accumulation": [(1, 4, 3), (4, 4, 99)],
        "back and forth": [(2, 4, 1), (3, 2, 2), (1, 12, 3), (2, 5, 99)],
    }
    for name, parts in cases.items():
        seen = epoch_in_parts(tmp_path / name, parts)
        assert sorted(chain.from_iterable(seen)) == list(range(COUNT)), (name, seen)


def test_a_loader_that_only_skips_begins_at_a_whole_batch_and_says_what_is_read_again(caplog):
    loader = DataLoader(TensorDataset(torch.arange(COUNT)), batch_size=8)
    feed = Feed(loader, ParallelContext())
    place = feed.load_state_dict(EpochPosition(batches=3, samples=12), None)
    assert next(feed.open(0, place))[0].tolist() == list(range(8, 16))
    assert feed.after(place, 1).samples == 16
    assert "4 of the 12 samples that this epoch has used are read again" in caplog.text


@pytest.mark.parametrize("ranks", [1, 2])
def test_sigterm_ends_a_run_in_order_and_it_resumes_to_the_bit(tmp_path, ranks):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    through = run_world(ranks, train, whole, {}, "ours", 50, None).values
    stopped = run_world(ranks, train, broken, {}, "ours", 50, (6, signal.SIGTERM, ranks - 1), check=False)
    assert [(outcome.type, outcome.message) for outcome in stopped.outcomes] == [("SystemExit", "75")] * ranks
    assert [line["step"] for line in steps_of(broken)] == list(range(1, 8))  # the step after the signal, and no more
    assert [folder.name for folder in (broken / "steps").glob("step-*")] == ["step-00000007"]
    for one, other in zip(through, run_world(ranks, train, broken, {}, "ours", 50, None).values, strict=True):
        assert_same(one, other)


SCRIPT = """
import sys, time
import torch
from torch.utils.data import DataLoader
from colonnade.trainer import BaseHook
from colonnade.trainer.hooks import SaveCheckpointHook, StopOnSignal
from tests.trainer.runs import dataset, make_trainer

class Slow(BaseHook):
    def after_train_iter(self, trainer, output, label, loss):
        print("step", trainer.cur_step, flush=True)
        time.sleep(0.1)

hooks = [Slow(), StopOnSignal(), SaveCheckpointHook(1000, sys.argv[1], by_epoch=False)]
make_trainer({}).fit(DataLoader(dataset(400), batch_size=4), epochs=9, hooks=hooks)
"""


@pytest.mark.slow
def test_a_process_that_is_told_to_stop_leaves_with_75_and_a_checkpoint(tmp_path):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        assert process.stdout is not None
        while process.stdout.readline() != "step 3\n":
            pass
        process.terminate()
        rest = process.stdout.read()
        assert process.wait(30) == 75
    assert re.findall(r"step (\d+)", rest) in (["4"], ["4", "5"])
    assert len(list(tmp_path.glob("step-*"))) == 1


def handlers() -> list[str]:
    before = signal.getsignal(signal.SIGTERM)
    trainer = make_trainer({})
    trainer.fit(loader_of("plain", trainer), max_steps=2, hooks=[StopOnSignal(), Kill(9, signal.SIGTERM)])
    assert signal.getsignal(signal.SIGTERM) == before
    failed: list[Exception] = []
    thread = threading.Thread(target=lambda: failed.extend(_in_a_thread(trainer)))
    thread.start()
    thread.join()
    return [str(error) for error in failed]


def _in_a_thread(trainer: Trainer) -> list[Exception]:
    try:
        trainer.fit(loader_of("plain", trainer), max_steps=4, hooks=[StopOnSignal()])
    except HookError as error:
        return [error]
    return []


def test_signal_handlers_are_put_back_and_belong_to_the_main_thread():
    (told,) = run_world(1, handlers).values[0]
    assert "main thread" in told

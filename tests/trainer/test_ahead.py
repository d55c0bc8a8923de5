"""Batches read one ahead, as on a device: nobody waits between two steps, and everything ends as it does elsewhere."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from colonnade.context.parallel_mode import ParallelMode
from colonnade.testing import run_world
from colonnade.trainer import BaseHook, Trainer, trainer
from colonnade.trainer.hooks import LoadCheckpointHook, LossHook, SaveCheckpointHook
from tests.trainer.runs import PIPELINE, cut, make_trainer, samples
from tests.trainer.test_hooks import failing
from tests.trainer.test_loaders import refused
from tests.trainer.test_resume import Steps, assert_same, steps_of, train


def ahead(function: Callable[..., Any], *args: Any) -> Any:
    """Call it as on a device."""
    trainer.ASKS_AHEAD.add("cpu")
    try:
        return function(*args)
    finally:
        trainer.ASKS_AHEAD.remove("cpu")


@pytest.mark.parametrize(
    ("config", "kind", "told"),
    [
        ({}, "breaking", "TrainerError after 2"),
        ({}, "lying", "TrainerError after 3"),
        (PIPELINE, "unsized", "TrainerError after 3"),
    ],
)
def test_a_rank_without_a_batch_is_an_error_on_every_rank_before_the_step(config, kind, told):
    values = run_world(2, ahead, refused, config, kind).values
    assert all(value.startswith(told) for value in values), values


@pytest.mark.parametrize(("point", "steps"), [("before_train_iter", 4), ("after_train_iter", 3), ("on_record", 3)])
def test_the_error_of_a_hook_is_raised_on_every_rank_one_step_later(point, steps):
    for found in run_world(2, ahead, failing, {}, point, 1, 2).values:
        assert f"hook Failing failed in {point}" in found["told"]
        assert found["heard"] == ["other after_train", "other close"]
        assert found["step"] == steps


def test_sigterm_ends_a_run_after_the_same_step_and_it_resumes_to_the_bit(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    through = run_world(2, ahead, train, whole, {}, "ours", 50, None).values
    stopped = run_world(2, ahead, train, broken, {}, "ours", 50, (6, signal.SIGTERM, 1), check=False)
    assert [(outcome.type, outcome.message) for outcome in stopped.outcomes] == [("SystemExit", "75")] * 2
    assert [line["step"] for line in steps_of(broken)] == list(range(1, 8))
    assert [folder.name for folder in (broken / "steps").glob("step-*")] == ["step-00000007"]
    again = run_world(2, ahead, train, broken, {}, "ours", 50, None).values
    for one, other in zip(through, again, strict=True):
        assert_same(one, other)
    assert through[0][2] == list(range(1, 15))  # every step was told once, in order


def test_the_weights_are_those_without_it(tmp_path):
    with_it = run_world(2, ahead, train, tmp_path / "one", {}, "ours", 50, None).values
    without = run_world(2, train, tmp_path / "other", {}, "ours", 50, None).values
    for one, other in zip(with_it, without, strict=True):
        assert_same(one, other)


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Draws from torch's own stream whenever a sample is fetched, as an augmentation does."""

    def __init__(self, rank: int) -> None:
        x, y = samples(40)
        self._x, self._y = x[rank::2], y[rank::2]

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, at: int) -> tuple[Tensor, Tensor]:
        return self._x[at] + 0.1 * torch.randn(self._x.shape[1:], dtype=torch.float64), self._y[at]


def noisy(folder: Path, steps: int, accumulation: int) -> Any:
    trainer = make_trainer({"gradient_accumulation": accumulation}, lr=0.1, dropout=0.3)
    told = Steps()
    loader = DataLoader(Noisy(trainer.context.get_local_rank(ParallelMode.DATA)), batch_size=2, shuffle=True)
    hooks = [LoadCheckpointHook(folder), told, LossHook(), SaveCheckpointHook(100, folder, by_epoch=False)]
    trainer.fit(loader, max_steps=steps, hooks=hooks)
    return [value.detach().clone() for value in trainer.engine.model.parameters()], told.told


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_batch_that_was_read_ahead_is_drawn_again_as_it_was(tmp_path, accumulation):
    # 10 batches an epoch; both runs have been saved and loaded in the middle of one, at different steps.
    through = run_world(2, ahead, noisy, tmp_path / "whole", 7, accumulation).values
    run_world(2, ahead, noisy, tmp_path / "parts", 3, accumulation)
    for one, other in zip(through, run_world(2, ahead, noisy, tmp_path / "parts", 7, accumulation).values, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))
        assert one[1] == other[1] == list(range(1, 8))


class Slow:
    """Fetches slowly on one rank."""

    def __init__(self, batches: list[Any], seconds: float) -> None:
        self._batches, self._seconds = batches, seconds

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            time.sleep(self._seconds)
            yield batch


class Waits(BaseHook):
    """Works for a while after every step, then notes how long it waits for the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[float] = []

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        time.sleep(0.05)
        assert trainer._fit is not None
        begin = time.perf_counter()
        trainer._fit.sums.wait()
        self.waited.append(time.perf_counter() - begin)


def waiting() -> list[float]:
    trainer = make_trainer({})
    mine = cut(range(32), 32)
    waits = Waits()
    slow = trainer.context.get_global_rank() == 1
    trainer.fit(Slow(mine, 0.04 if slow else 0.0), epochs=1, hooks=[waits])
    return waits.waited


def test_the_answer_is_there_when_the_step_has_been_made():
    for waited in run_world(2, ahead, waiting).values:
        assert len(waited) == 8
        assert sorted(waited)[4] < 0.01, waited

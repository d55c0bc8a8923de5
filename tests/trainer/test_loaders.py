"""Loaders that differ from rank to rank: handled, or one clear error on every rank, and never a hang."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import default_collate

from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import ConfigError, ScheduleError, TrainerError
from colonnade.testing import compare, gather_weights, run_world
from colonnade.trainer.data import Lengths, read_lengths
from colonnade.trainer.hooks import LossHook, LRSchedulerHook
from colonnade.utils import get_dataloader
from tests.ranks import on_ranks
from tests.trainer.runs import PIPELINE, cut, dataset, make_trainer, model, run_each, samples

COUNT = 32


class Unsized:
    """Batches of unknown number."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


class Lying(Unsized):
    """Says that it has more than it gives."""

    def __len__(self) -> int:
        return 5


class Breaking(Lying):
    """Fails after a few batches."""

    def __iter__(self) -> Iterator[Any]:
        yield from self._batches[:2]
        raise OSError("the disk is gone")


def shares(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Five batches on rank 0, three on rank 1."""
    return cut(range(20), COUNT) if rank == 0 else cut(range(20, COUNT), COUNT)


def shorter(config: dict[str, Any], kind: str) -> Any:
    trainer = make_trainer(config, lr=0.1)
    batches: Any = shares(trainer.context.get_local_rank(ParallelMode.DATA))
    batches = Unsized(batches) if kind == "unsized" else batches
    scheduler = torch.optim.lr_scheduler.StepLR(trainer.engine.optimizer, 2, 0.5)
    if kind == "in parts":  # the first ends where rank 1 has no batch
        trainer.fit(batches, max_steps=4, hooks=[LRSchedulerHook(scheduler, by_epoch=False)])
        assert trainer.cur_step == 4
    trainer.fit(batches, epochs=2, hooks=[LRSchedulerHook(scheduler, by_epoch=False)])
    weights = gather_weights(trainer.engine.model, trainer.context)
    trainer.context.destroy()
    return weights, trainer.cur_step, scheduler.last_epoch


def truth() -> dict[str, Tensor]:
    """One process: the mean of the batches that there are at each step."""
    plain = model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for _ in range(2):
        for step in range(5):
            optimizer.zero_grad()
            there = [shares(rank)[step] for rank in (0, 1) if step < len(shares(rank))]
            (sum(F.cross_entropy(plain(x), y) for x, y in there) / len(there)).backward()
            optimizer.step()
            scheduler.step()
    return {name: value.detach() for name, value in plain.named_parameters()}


@pytest.mark.parametrize(
    ("ranks", "config", "kinds"), [(2, {}, ("sized", "unsized", "in parts")), (4, PIPELINE, ("sized",))]
)
def test_a_shorter_loader_on_one_rank_is_trained_to_its_end(ranks, config, kinds):
    for found in run_world(ranks, run_each, shorter, [(config, kind) for kind in kinds]).values:
        for weights, steps, scheduled in found:
            compare(truth(), weights, 1e-10)
            assert (steps, scheduled) == (10, 10)


def refused(config: dict[str, Any], kind: str) -> str:
    trainer = make_trainer(config, lr=0.1)
    mine: Any = cut(range(20), COUNT)
    if trainer.context.get_global_rank() == 1:
        mine = {"short": mine[:3], "lying": Lying(mine[:3]), "breaking": Breaking(mine), "unsized": Unsized(mine[:3])}[
            kind
        ]
    elif kind == "unsized":
        mine = Unsized(mine)
    with trainer.context:
        try:
            trainer.fit(mine, epochs=2, hooks=[LossHook()])
        except (ConfigError, TrainerError) as error:
            return f"{type(error).__name__} after {trainer.cur_step}: {error}"
        return f"trained {trainer.cur_step} steps"


TENSOR = {"parallel": {"tensor": {"size": 2, "mode": "1d"}}}


REFUSED: list[tuple[dict[str, Any], str, str, str]] = [
    (PIPELINE, "short", "ConfigError after 0", "5 and 3 batches"),
    (TENSOR, "short", "ConfigError after 0", "5 and 3 batches"),
    ({"parallel": {"expert": 2}}, "short", "ConfigError after 0", "5 and 3 batches"),
    (PIPELINE, "unsized", "TrainerError after 3", ""),
    (PIPELINE, "breaking", "TrainerError after 2", "OSError: the disk is gone"),
    ({}, "breaking", "TrainerError after 2", "OSError: the disk is gone"),
    ({}, "lying", "TrainerError after 3", ""),
]


def test_what_cannot_work_is_an_error_on_every_rank():
    for values in run_world(2, run_each, refused, [case[:2] for case in REFUSED]).values:
        for (*_, told, part), value in zip(REFUSED, values, strict=True):
            assert value.startswith(told), values
            assert part in value


def pairs(rows: list[Any]) -> Any:
    """A collator, which may make other rows."""
    return default_collate(rows)


def small_last_batch(count: int, size: int, options: dict[str, Any]) -> Any:
    """What `fit` said, and how many steps were made before."""
    trainer = make_trainer(PIPELINE)  # of two micro-batches
    limits = {name: options.pop(name) for name in ("max_steps", "epochs") if name in options}
    loader = get_dataloader(dataset(count), context=trainer.context, batch_size=size, **options)
    with trainer.context:
        try:
            trainer.fit(loader, **limits or {"epochs": 1})
        except ScheduleError as error:
            return trainer.cur_step, str(error)
        return trainer.cur_step, ""


SMALL: list[tuple[int, int, dict[str, Any], int, str]] = [
    (9, 4, {}, 0, "the last batch of an epoch will have 1 rows"),
    (9, 4, {"drop_last": True}, 2, ""),
    (9, 4, {"max_steps": 2}, 2, ""),
    (10, 4, {}, 3, ""),
    # Rows of the collator's own making: known when the batch comes.
    (9, 4, {"collate_fn": pairs}, 2, "cannot be split into 2 micro-batches"),
]


def test_a_last_batch_that_is_too_small_is_told_before_the_first_step():
    for found in run_world(2, run_each, small_last_batch, [case[:3] for case in SMALL]).values:
        for (*_, steps, told), (made, text) in zip(SMALL, found, strict=True):
            assert made == steps
            assert told in text
            assert bool(text) == bool(told)


def broken_test() -> str:
    trainer = make_trainer({})
    mine: Any = cut(range(20), COUNT)
    try:
        trainer.evaluate(Breaking(mine) if trainer.context.get_global_rank() == 1 else mine)
    except TrainerError as error:
        return str(error)
    return ""


def loss_of_parts() -> float:
    trainer = make_trainer({})
    with trainer.context:
        return trainer.evaluate(Unsized(shares(trainer.context.get_global_rank())))["Loss"]


def test_a_test_loader_of_unknown_length_may_be_shorter_on_one_rank():
    x, y = samples(COUNT)
    expected = pytest.approx(F.cross_entropy(model()(x), y).item(), rel=1e-12)
    assert run_world(2, loss_of_parts).values == [expected] * 2


def test_a_test_loader_that_fails_on_one_rank_is_an_error_on_every_rank():
    assert all("OSError: the disk is gone" in told for told in run_world(2, broken_test).values)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (torch.zeros(8, 6), r"a tensor of shape \(8, 6\).*\[batch\]"),
        ({"x": torch.zeros(8, 6)}, r"a dict.*\[batch\]"),
        (dataset(8), r"a TensorDataset.*get_dataloader"),
        (None, "a NoneType"),
        ("data", "a str"),
    ],
    ids=lambda given: type(given).__name__,
)
def test_what_is_no_loader_is_refused(given, told):
    with pytest.raises(ConfigError, match=f"an iterable of batches, but it is {told}"):
        read_lengths(given, ParallelContext())


@on_ranks(2)
def test_what_is_no_loader_on_one_rank_is_refused_on_every_rank():
    trainer = make_trainer({})
    x = samples(8)[0]
    for call in (trainer.predict, trainer.evaluate, partial(trainer.fit, epochs=1)):
        with pytest.raises(ConfigError, match="but it is a tensor of shape"):
            call(x if trainer.context.get_global_rank() == 0 else [x])
    with pytest.raises(ConfigError, match="but it is a tensor of shape"):
        trainer.fit(cut(range(8), 8), epochs=1, test_dataloader=x)
    assert trainer.cur_step == 0  # before anything is trained
    assert trainer.predict([x]).shape == (16, 3)


def test_lengths_speak_of_ranks():
    assert read_lengths([1, 2], ParallelContext()) == Lengths((2,))
    assert not read_lengths(Unsized([]), ParallelContext()).known
    assert str(Lengths((5, 3))) == "rank 0 has 5, rank 1 has 3"
    with pytest.raises(ConfigError, match="no batches"):
        read_lengths([], ParallelContext())

"""An evaluation counts each sample once: samplers that repeat samples to give every rank equally many change no metric."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.build import initialize
from colonnade.errors import ConfigError, TrainerError
from colonnade.testing import run_world
from colonnade.trainer import BaseHook, Trainer
from colonnade.trainer.evaluation import _each_once
from colonnade.trainer.hooks import AccuracyHook, EvaluateHook, LossHook, MetricHook
from colonnade.utils import get_dataloader
from tests.ranks import on_ranks
from tests.trainer.runs import FEATURES, PIPELINE, cut, dataset, make_trainer, samples, uneven
from tests.trainer.test_metrics import STATES, Margin, counted


def squares(output: Tensor, label: Tensor) -> Tensor:
    """A mean over rows."""
    return (output[torch.arange(len(label)), label] - 1.0).square().mean()


class Rows(BaseHook):
    """The labels that hooks have seen on this rank, and how often they were called."""

    def __init__(self) -> None:
        super().__init__(priority=0)
        self.labels: list[int] = []
        self.calls = 0

    def before_test_iter(self, trainer: Trainer) -> None:
        self.calls += 1

    def after_test_iter(self, trainer: Trainer, output: Any, label: Any, loss: Tensor | None) -> None:
        self.calls -= 1
        if label is not None:
            assert len(output) == len(label)
            self.labels += label.tolist()


def loader_of(trainer: Trainer, count: int, size: int, kind: str) -> Any:
    """A loader whose sampler repeats samples where ranks do not divide the count."""
    data = dataset(count)
    if kind in ("ours", "shuffled"):
        return get_dataloader(data, kind == "shuffled", context=trainer.context, batch_size=size)
    ranks, place = trainer.context.layout.distinct_data, 0
    if trainer.context.is_initialized(ParallelMode.DATA):
        place = trainer.context.get_local_rank(ParallelMode.DATA)
    sampler: Any = DistributedSampler(data, ranks, place, shuffle=kind == "torch's, shuffled")
    if kind == "in a batch sampler":
        return DataLoader(data, batch_sampler=BatchSampler(sampler, size, False))
    return DataLoader(data, size, sampler=sampler, drop_last=kind == "whole batches")


def measured(config: dict[str, Any], criterion: str, shapes: list[tuple[int, int]], kind: str = "ours") -> Any:
    trainer = make_trainer(config, {"squares": squares, "counted": counted}.get(criterion, nn.CrossEntropyLoss()))
    found = {}
    for count, size in shapes:
        rows = Rows()
        hooks = [LossHook(), AccuracyHook(), MetricHook(Margin, states=STATES), rows]
        values = trainer.evaluate(loader_of(trainer, count, size, kind), hooks)
        assert rows.calls == 0
        found[count, size] = values, sorted(rows.labels)
    return found


SHAPES = [(11, 2), (11, 3), (9, 4), (7, 3), (1, 4), (8, 4)]
"""Samples and the size of a batch. Of 9 by 4 on two ranks the last batch of rank 1 is a repeat alone; 7 by 3 leaves one row for
two micro-batches."""


@cache
def truth(criterion: str) -> Any:
    return run_world(1, measured, {}, criterion, SHAPES).values[0]


@pytest.mark.parametrize(
    ("ranks", "config", "criterion", "kind"),
    [
        (2, {}, "mean", "shuffled"),
        (2, {}, "counted", "torch's, shuffled"),
        (2, {"zero": 3}, "mean", "in a batch sampler"),
        (2, PIPELINE, "counted", "ours"),
        pytest.param(4, PIPELINE, "squares", "ours", marks=pytest.mark.slow),
        pytest.param(4, {"parallel": {"tensor": {"size": 2, "mode": "1d"}}}, "mean", "ours", marks=pytest.mark.slow),
        pytest.param(3, {}, "squares", "ours", marks=pytest.mark.slow),
    ],
)
def test_metrics_of_loaders_that_repeat_samples_are_those_of_one_process(ranks, config, criterion, kind):
    together = run_world(ranks, measured, config, criterion, SHAPES, kind).values
    for shape, (values, labels) in truth(criterion).items():
        assert len(labels) == shape[0]
        for found in together:
            assert found[shape][0] == pytest.approx(values, rel=1e-12, abs=1e-12), shape
        if "parallel" not in config:
            assert sorted(label for found in together for label in found[shape][1]) == labels


def test_a_loader_that_leaves_out_what_fills_no_batch_keeps_the_rows_beside_a_repeat():
    for found in run_world(2, measured, {}, "mean", [(11, 3)], "whole batches").values:  # 6 and 5 samples
        assert found[11, 3][0] == pytest.approx(truth("mean")[11, 3][0], rel=1e-12)


@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks("ranks")
def test_an_evaluation_of_the_training_data_in_the_middle_of_an_epoch_sees_all_of_it(ranks):
    trainer = make_trainer({})
    loader = get_dataloader(dataset(22), True, context=trainer.context, batch_size=4)
    seen: list[list[float]] = []

    class Noted(BaseHook):
        def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Tensor | None) -> None:
            seen.append(output[:, 0].tolist())

        def after_test(self, trainer: Trainer) -> None:
            losses.append(trainer.metric_values("test")["Loss"])

    losses: list[float] = []
    found = []
    for hooks in ([], [EvaluateHook(loader, interval=1)]):
        seen.clear()
        trainer = make_trainer({})
        trainer.fit(loader, epochs=2, hooks=[LossHook(), Noted(20), *hooks])
        found.append([list(rows) for rows in seen])
    assert found[0] == found[1]  # training has the batches that it would have had
    assert max(losses) - min(losses) < 1e-12
    loader.sampler.load_state_dict({"epoch": 0, "position": 8, "seed": 1024})  # type: ignore[attr-defined]
    predicted = trainer.predict(loader)
    with torch.no_grad():
        torch.testing.assert_close(predicted, trainer.engine(samples(22)[0]), rtol=1e-12, atol=0)
    during, alone = losses[0], trainer.evaluate(cut(range(22), 22))["Loss"]
    assert during == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize("known", [True, False])
@on_ranks(2)
def test_ranks_that_gather_weights_cannot_have_unequally_many_batches(known: bool):
    trainer = make_trainer({"zero": 3})
    mine = uneven(trainer.context, 23)
    told = []
    for call in (trainer.evaluate, trainer.predict):
        with pytest.raises((ConfigError, TrainerError)) as raised:
            call(mine if known else (batch for batch in mine))
        told.append(str(raised.value))
    assert all(("ZeRO stage 3" if known else "have run out of batches") in text for text in told)


def by_a_model_of_its_own_loss() -> Any:
    gpc = launch({}, context=ParallelContext(), verbose=False)
    torch.manual_seed(0)

    class Losing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.Linear(FEATURES, 1).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.inside(x).square().mean()

    net = Losing()
    engine, *_ = initialize(net, torch.optim.SGD(net.parameters(), lr=0.0), context=gpc)
    data: Any = [row for row, _ in dataset(11)]
    return Trainer(engine).evaluate(get_dataloader(data, context=gpc, batch_size=4), [LossHook()])


def test_a_model_that_makes_its_own_loss_counts_each_sample_once():
    (alone,) = run_world(1, by_a_model_of_its_own_loss).values
    for found in run_world(2, by_a_model_of_its_own_loss).values:
        assert found == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize(
    ("size", "drop_last", "alone", "rows"),
    [
        (3, True, None, [1, 3]),  # a whole batch, were it not for the repeat: it is still there
        (2, False, 1, [1, 3, 0]),  # the repeat alone fills the second batch
        (2, True, 1, [1, 3]),  # and is left out by the loader
        (4, False, None, [1, 3]),
    ],
)
def test_what_is_changed_for_an_evaluation_is_put_back(size, drop_last, alone, rows):
    data = dataset(5)
    sampler: Any = DistributedSampler(data, 2, 1, shuffle=False)
    loader = DataLoader(data, size, sampler=sampler, drop_last=drop_last)
    batches: Any = loader.batch_sampler
    before = list(batches)
    with _each_once(loader) as number:
        assert number == alone
        assert [index for batch in batches for index in batch] == rows
        assert len(loader) == len(before)
    assert list(batches) == before
    assert batches.sampler is sampler
    assert batches.drop_last is drop_last


def test_loaders_that_repeat_nothing_are_left_alone():
    data = dataset(5)
    first, whole = (
        DistributedSampler(data, 2, rank, shuffle=False, drop_last=drop) for rank, drop in ((0, False), (1, True))
    )
    loaders: list[Any] = [
        DataLoader(data, 2),
        DataLoader(data, batch_sampler=[[0, 1], [2]]),
        [1, 2],
        DataLoader(data, None),
        DataLoader(data, 2, sampler=first),
        DataLoader(data, 2, sampler=whole),
    ]
    for loader in loaders:
        before = [str(batch) for batch in loader]
        with _each_once(loader) as number:
            assert number is None
            assert [str(batch) for batch in loader] == before
    with _each_once(DataLoader(data, None, sampler=DistributedSampler(data, 2, 1))) as number:
        assert number == 2  # each sample is a batch

"""The trainer as a user calls it: the ancestor's flow, prediction, logs, stops, timers, one rank and several."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import colonnade
from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.engine.schedule import BaseSchedule
from colonnade.errors import ConfigError, HookError
from colonnade.logging import get_dist_logger
from colonnade.testing import run_world
from colonnade.trainer import BaseHook, StepRecord, Trainer, hooks
from colonnade.utils import get_dataloader
from tests.ranks import on_ranks
from tests.trainer.runs import PIPELINE, cut, dataset, make_trainer, model, run_each, samples


def ancestor() -> dict[str, Any]:
    """A script in the ancestor's words, with its arguments."""
    gpc = colonnade.launch({"BATCH_SIZE": 8, "NUM_EPOCHS": 3, "clip_grad_norm": 1.0}, verbose=True)
    logger = get_dist_logger()
    train, test = dataset(64), dataset(20)
    train_dataloader = get_dataloader(train, shuffle=True, batch_size=gpc.config.BATCH_SIZE)
    test_dataloader = get_dataloader(test, add_sampler=False, batch_size=gpc.config.BATCH_SIZE)
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    lr_scheduler = colonnade.nn.lr_scheduler.CosineAnnealingLR(optimizer, total_steps=gpc.config.NUM_EPOCHS)
    engine, train_dataloader, test_dataloader, lr_scheduler = colonnade.initialize(
        net, optimizer, torch.nn.CrossEntropyLoss(), train_dataloader, test_dataloader, lr_scheduler
    )
    trainer = Trainer(engine=engine, logger=logger)
    hook_list = [
        hooks.LossHook(),
        hooks.LRSchedulerHook(lr_scheduler=lr_scheduler, by_epoch=True),
        hooks.AccuracyHook(accuracy_func=lambda output, label: (output.argmax(-1) == label).sum()),
        hooks.LogMetricByEpochHook(logger),
        hooks.LogMemoryByEpochHook(logger),
        hooks.LogMetricByStepHook(),
        hooks.ThroughputHook(ignored_steps=1, tflop_per_step=0.5),
    ]
    trainer.fit(
        train_dataloader=train_dataloader,
        epochs=gpc.config.NUM_EPOCHS,
        test_dataloader=test_dataloader,
        test_interval=1,
        hooks=hook_list,
        display_progress=False,
    )
    return {
        "accuracy": trainer.states["metrics"]["test"]["Accuracy"].get_accumulated_value(),
        "lr": trainer.states["metrics"]["train"]["LR"].get_accumulated_value(),
        "throughput": trainer.states["metrics"]["train"]["Throughput"].get_accumulated_value(),
        "step": trainer.states["step_metrics"],
        "place": (trainer.cur_epoch, trainer.cur_step, trainer.max_epochs, trainer.max_steps, trainer.steps_per_epoch),
    }


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_ancestors_flow(ranks):
    world = run_world(ranks, ancestor)
    steps = 8 // ranks
    for found in world.values:
        assert found["place"] == (3, 3 * steps, 3, None, steps)
        assert found["accuracy"] > 0.7
        assert found["lr"] == pytest.approx(0.0)
        assert found["throughput"] > 0
        assert math.isfinite(found["step"]["loss"])
        assert found["step"]["grad_norm"] > 0
    log = world.stderr[0]
    assert "epoch 3 train: Loss = " in log
    assert "epoch 3 test: Loss = " in log
    assert "memory: peak " in log
    assert all("epoch 3" not in other for other in world.stderr[1:])


def predicted(config: dict[str, Any], kind: str) -> Any:
    trainer = make_trainer(config)
    with trainer.context:
        if kind == "batches":
            return trainer.predict([x for x, _ in cut(range(8), 19)] if not config else cut(range(8), 19))
        options = {"shuffle": kind == "shuffled", "add_sampler": kind != "whole"}
        return trainer.predict(get_dataloader(dataset(19), context=trainer.context, batch_size=5, **options))


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (1, [({}, "sampler"), ({}, "batches")]),
        (2, [({}, "sampler"), ({}, "shuffled"), ({}, "whole"), (PIPELINE, "batches")]),
        pytest.param(4, [(PIPELINE, "sampler")], marks=pytest.mark.slow),
    ],
)
def test_predictions_are_in_the_order_of_the_samples_on_every_rank(ranks, cases):
    expected = model()(samples(19)[0]).detach()
    for found in run_world(ranks, run_each, predicted, cases).values:
        for (_, kind), rows in zip(cases, found, strict=True):
            torch.testing.assert_close(rows, expected[: 8 if kind == "batches" else None], rtol=1e-12, atol=0)


def test_a_loader_of_random_order_cannot_be_predicted_in_order():
    trainer = make_trainer({})
    with pytest.raises(ConfigError, match="shuffle=False"):
        trainer.predict(DataLoader(dataset(8), shuffle=True))
    assert trainer.engine.training
    assert not trainer.predict(DataLoader(dataset(8))).requires_grad
    assert trainer.engine.training
    trainer.context.destroy()


class Told(BaseHook):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[StepRecord] = []

    def on_record(self, trainer: Trainer, record: StepRecord) -> None:
        self.records.append(record)


def recorded(config: dict[str, Any], accumulation: int) -> list[StepRecord]:
    config = {**config, "gradient_accumulation": accumulation, "clip_grad_norm": {"max_norm": 9.0, "report": "layer"}}
    trainer = make_trainer(config, lr=0.2)
    told = Told()
    mine = cut(range(24), 24)
    ranks = trainer.context.layout.distinct_data
    mine = mine[trainer.context.get_global_rank() :: 2] if ranks == 2 else mine
    trainer.fit(mine, epochs=1, hooks=[told, hooks.GradientNormHook()])
    return told.records


def test_records_have_the_loss_and_the_samples_of_all_ranks():
    plain = model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.2)
    expected = []
    for x, y in cut(range(24), 24, size=8):
        optimizer.zero_grad()
        loss = F.cross_entropy(plain(x), y)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 9.0)
        expected.append((loss.item(), norm.item()))
        optimizer.step()
    for ranks, config, accumulation in ((2, {}, 1), (2, PIPELINE, 2), (1, {}, 2)):
        for records in run_world(ranks, recorded, config, accumulation).values:
            assert [(r.step, r.epoch, r.samples, r.lr) for r in records] == [(at, 0, 8, 0.2) for at in (1, 2, 3)]
            assert [(r.loss, r.grad_norm) for r in records] == [pytest.approx(pair, rel=1e-9) for pair in expected]
            norms = [value for name, value in records[0].values.items() if name.startswith("grad_norm/")]
            assert math.hypot(*norms) == pytest.approx(expected[0][1], rel=1e-9)


@on_ranks(2)
def test_a_run_that_does_not_get_better_stops_on_every_rank():
    trainer = make_trainer({}, lr=0.0)
    batches = cut(range(8), 8)
    stop = hooks.EarlyStopHook("Accuracy", patience=2)
    trainer.fit(batches, epochs=50, test_dataloader=batches, hooks=[hooks.AccuracyHook(), stop])
    epoch, reason = trainer.cur_epoch, trainer.stop_reason
    assert epoch == 4
    assert "Accuracy has not improved for 3 epochs" in reason


def test_arguments_and_what_is_missing():
    trainer = make_trainer({})
    batches = cut(range(16), 16)
    with pytest.raises(HookError, match=r"no test metric 'Los'.*Did you mean 'Loss'"):
        trainer.fit(batches, 1, None, batches, hooks=[hooks.LossHook(), hooks.EarlyStopHook("Los")])
    with pytest.raises(HookError, match="return_output_label=True"):
        trainer.fit(batches, 5, hooks=[hooks.AccuracyHook()], return_output_label=False)
    with pytest.raises(HookError, match="Set clip_grad_norm"):
        trainer.fit(batches, 5, hooks=[hooks.GradientNormHook()])
    needy = hooks.WandbHook("x")
    needy.package = "no_such_package"
    with pytest.raises(HookError, match=r"WandbHook needs wandb.*pip install wandb, or use JsonlHook"):
        trainer.fit(batches, 5, hooks=[needy])
    trainer.cur_epoch = 3
    trainer.fit(batches, epochs=5, max_steps=trainer.cur_step + 6, hooks=[hooks.LossHook()], return_output_label=False)
    assert (trainer.cur_epoch, trainer.max_steps) == (4, trainer.cur_step)
    trainer.fit(batches, epochs=5)  # the two batches that are left
    assert trainer.cur_epoch == 5
    assert trainer.steps_per_epoch == 4
    trainer.context.destroy()


class OwnLoss(nn.Module):
    """Returns its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = model()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layers(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def test_a_model_with_a_loss_of_its_own_needs_no_criterion():
    gpc = launch({}, context=ParallelContext(), verbose=False)
    built = OwnLoss()
    engine, *_ = initialize(built, torch.optim.SGD(built.parameters(), lr=0.0), context=gpc)
    trainer = Trainer(engine)
    batches = [{"x": x, "labels": y} for x, y in cut(range(10), 10)]
    expected = F.cross_entropy(model()(samples(10)[0]), samples(10)[1]).item()
    assert trainer.evaluate(batches) == {}  # it is not known yet that there is a loss
    assert trainer.evaluate(batches, [hooks.LossHook()]) == {"Loss": pytest.approx(expected)}
    trainer.fit(batches, epochs=1, test_dataloader=batches, hooks=[hooks.LossHook()])
    for kind in ("train", "test"):
        assert trainer.metric_values(kind) == {"Loss": pytest.approx(expected)}
    assert trainer.evaluate(batches, hooks=[]) == {}
    assert trainer.predict(batches)["logits"].shape == (10, 3)
    gpc.destroy()


class Twice(BaseSchedule):
    """Learns from a batch as if it were there twice."""

    def forward_back_step(self, engine, data_iter, forward_only=False, return_loss=True, return_output_label=True):
        data, label = self.load_batch(data_iter)
        loss = engine.criterion(engine(data), label) * 2
        if not forward_only:
            engine.backward(loss)
        return None, None, loss.detach()


def test_a_schedule_of_the_users():
    x, y = samples(8)
    trainer = Trainer(make_trainer({}).engine, schedule=Twice())
    found = trainer.evaluate(cut(range(8), 8))["Loss"]
    trainer.context.destroy()
    assert found == pytest.approx(2 * F.cross_entropy(model()(x), y).item())


class Slow(BaseHook):
    """Takes its time between epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def before_train_epoch(self, trainer: Trainer) -> None:
        time.sleep(0.3)

    def after_test_epoch(self, trainer: Trainer) -> None:
        time.sleep(0.3)

    def on_record(self, trainer: Trainer, record: StepRecord) -> None:
        self.seconds.append(record.seconds - record.values.get("time/evaluation", 0.0))


def test_what_hooks_do_between_epochs_is_no_time_of_a_step() -> None:
    hook = Slow()
    trainer = make_trainer({})
    trainer.fit(cut(range(4), 4), epochs=3, test_dataloader=cut(range(8), 8), hooks=[hook])
    trainer.context.destroy()
    assert len(hook.seconds) == 3
    assert sorted(hook.seconds)[1] < 0.3  # a busy machine may hold up one of them

"""One process: what hooks measure is what plain torch says, and it survives a checkpoint."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from colonnade.errors import ConfigError
from colonnade.trainer import StepRecord, metrics
from colonnade.trainer.hooks import (
    AccuracyHook,
    GradientNormHook,
    LossHook,
    LRSchedulerHook,
    MetricHook,
    ThroughputHook,
)
from colonnade.trainer.metrics import MeanMetric, StatefulMetric
from tests.engine.test_engine import world_of_one
from tests.trainer.runs import make_trainer, uneven
from tests.trainer.test_metrics import COUNT, STATES, Margin, counted, truth


@pytest.mark.parametrize("criterion", ["mean", "counted"])
def test_loss_accuracy_and_a_metric_of_ones_own(criterion):
    trainer = make_trainer({"clip_grad_norm": math.inf}, *([counted] if criterion == "counted" else []))
    with trainer.context:
        batches = uneven(trainer.context, COUNT)
        hooks = [LossHook(), AccuracyHook(), MetricHook(Margin, states=STATES), ThroughputHook(1, 3.0)]
        trainer.fit(batches, epochs=2, hooks=hooks, test_dataloader=batches)
        known = trainer.states["metrics"]
        for kind in ("train", "test"):
            for name, value in truth(criterion).items():
                assert known[kind][name].get_accumulated_value() == pytest.approx(value, rel=1e-12), (kind, name)
        assert {name for name in known["train"] if known["train"][name].higher_is_better} == {
            *("Accuracy", "Margin", "Throughput", "TFLOPS")
        }
        assert "Throughput" not in known["test"]
        trainer.engine.close()


def test_throughput_is_samples_over_seconds_but_for_the_first_steps():
    with world_of_one() as gpc:
        trainer: Any = SimpleNamespace(states={"metrics": {"train": {}}}, context=gpc)
        hook = ThroughputHook(ignored_steps=2, tflop_per_step=6.0)
        hook.after_hook_is_attached(trainer)
        hook.before_train_epoch(trainer)
        for step, seconds in enumerate((99.0, 99.0, 2.0, 4.0)):
            hook.on_record(trainer, StepRecord(step, 0, None, None, None, 12, seconds))
        hook.after_train_epoch(trainer)
        found = {name: metric.get_accumulated_value() for name, metric in trainer.states["metrics"]["train"].items()}
        assert found == {"Throughput": 4.0, "TFLOPS": 2.0}
        hook.before_train_epoch(trainer)  # the steps of an epoch only
        hook.on_record(trainer, StepRecord(4, 1, None, None, None, 12, 1.0))
        hook.after_train_epoch(trainer)
        assert trainer.states["metrics"]["train"]["Throughput"].get_accumulated_value() == 12.0
        assert trainer.states["metrics"]["train"]["TFLOPS"].get_accumulated_value() == 6.0
        plain = ThroughputHook()
        plain.after_hook_is_attached(trainer)
        plain.before_train_epoch(trainer)
        plain.on_record(trainer, StepRecord(0, 0, None, None, None, 12, 3.0))  # none is ignored
        plain.after_train_epoch(trainer)
        assert trainer.states["metrics"]["train"]["Throughput"].get_accumulated_value() == 4.0


def test_gradient_norms_are_logged_at_every_so_many_steps():
    said: list[dict[str, float]] = []
    engine = SimpleNamespace(grad_norms=lambda: {"a": 1.0, "b": 2.0}, may_skip=True)
    trainer: Any = SimpleNamespace(engine=engine, log=said.append, states={}, step_done=True, cur_step=0)
    hook = GradientNormHook(interval=3)
    hook.after_hook_is_attached(trainer)
    for trainer.cur_step in range(1, 7):
        hook.after_train_iter(trainer, None, None, None)
    assert said == [{"grad_norm/a": 1.0, "grad_norm/b": 2.0}] * 2
    trainer.step_done = False  # between two steps
    hook.after_train_iter(trainer, None, None, None)
    trainer.step_done, engine.grad_norms = True, lambda: {"all": 1.0}  # the record has the global one
    hook.after_train_iter(trainer, None, None, None)
    assert len(said) == 2
    hook.on_record(trainer, StepRecord(1, 0, None, None, 5.0, 1, 1.0))
    hook.on_record(trainer, StepRecord(2, 0, None, None, None, 1, 1.0))
    assert trainer.states == {"grad_norm": 5.0}
    engine.may_skip = False
    with pytest.raises(ConfigError, match="clip_grad_norm"):
        hook.after_hook_is_attached(trainer)


def test_a_mean_goes_on_from_what_was_saved_and_is_nan_of_nothing():
    with world_of_one() as gpc:
        first, second = MeanMetric(gpc), MeanMetric(gpc)
        first.gather()
        assert math.isnan(first.get_accumulated_value())
        first.update(torch.tensor(6.0), 2)
        first.update_global(1.0, 1.0)
        first.gather()
        second.load_state_dict(first.state_dict())
        assert first.get_accumulated_value() == second.get_accumulated_value() == 7 / 3
        second.update(2.0, 1)
        second.gather()
        assert second.get_accumulated_value() == 9 / 4
        second.reset()
        second.update(5.0, 1)
        second.gather()
        assert second.get_accumulated_value() == 5.0


def test_a_metric_of_ones_own_goes_on_from_what_was_saved():
    output, label = torch.eye(3, dtype=torch.float64) * 2, torch.tensor([0, 1, 0])
    with world_of_one() as gpc:
        first, second = (StatefulMetric(Margin(), gpc, STATES) for _ in range(2))
        for metric in (first, second):
            metric.gather()
            assert math.isnan(metric.get_accumulated_value())
        first.update(output, label)
        first.gather()
        second.load_state_dict(first.state_dict())
        assert second.get_accumulated_value() == first.get_accumulated_value()
        for metric in (first, second):
            metric.update(output * 3, label)
            metric.gather()
        assert second.get_accumulated_value() == first.get_accumulated_value()
        alone = StatefulMetric(Margin(), gpc)  # whose state nobody knows
        alone.update(output, label)
        alone.gather()
        assert alone.get_accumulated_value() == pytest.approx(_of(output, label))
        assert alone.state_dict() == {}
        with pytest.raises(ConfigError, match="lacks"):
            StatefulMetric(object(), gpc)


def _of(output: torch.Tensor, label: torch.Tensor) -> float:
    margin = Margin()
    margin.update(output, label)
    return margin.compute()


@pytest.mark.parametrize("by_epoch", [True, False])
def test_a_learning_rate_moves_after_steps_or_after_epochs(by_epoch):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=8.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    trainer: Any = SimpleNamespace(states={"metrics": {"train": {}}}, step_done=False, epoch_done=False)
    hook = LRSchedulerHook(scheduler, by_epoch)
    hook.after_hook_is_attached(trainer)
    seen = []
    for trainer.step_done, trainer.epoch_done in ((False, False), (True, False), (True, True)):
        hook.after_train_iter(trainer, None, None, None)
        seen.append(trainer.states["metrics"]["train"]["LR"].get_accumulated_value())
        hook.after_train_epoch(trainer)
        seen.append(trainer.states["metrics"]["train"]["LR"].get_accumulated_value())
    assert seen == ([8, 8, 8, 8, 8, 4] if by_epoch else [8, 8, 4, 4, 2, 2])
    saved = hook.state_dict()
    hook._step()
    hook.load_state_dict(saved)
    assert trainer.states["metrics"]["train"]["LR"].get_accumulated_value() == seen[-1]
    trainer.states["metrics"]["train"].clear()
    LRSchedulerHook(scheduler, by_epoch, store_lr_in_state=False).after_hook_is_attached(trainer)
    assert trainer.states["metrics"]["train"] == {}


class Updated:
    """A metric that writes down what it sees."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def update(self, *given: Any) -> None:
        self.seen.append(given)

    def compute(self) -> float:
        return 1.0

    def reset(self) -> None: ...


@pytest.mark.parametrize("found", [2, (2, 5)])
def test_an_accuracy_of_ones_own_is_out_of_the_rows_or_of_what_it_says(found):
    metric: Any = Updated()
    hook, trainer = AccuracyHook(lambda output, label: found), SimpleNamespace()
    hook.measure(metric, trainer, None, None, None)  # type: ignore[arg-type]
    hook.measure(metric, trainer, "output", "label", None)  # type: ignore[arg-type]
    assert metric.seen == [(2, 5)]
    own = SimpleNamespace(compared=lambda output, label: (output + 1, label + 1))
    for engine, expected in ((None, (1, 2)), (own, (0, 2))):
        metric.seen.clear()
        here: Any = SimpleNamespace(engine=SimpleNamespace(own_loss=engine))
        AccuracyHook().measure(metric, here, torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([1, 1]), None)
        ((right, count),) = metric.seen
        assert (int(right), count) == expected


def test_a_metric_is_copied_or_made_and_sees_outputs_without_their_graph():
    with world_of_one() as gpc:
        trainer: Any = SimpleNamespace(context=gpc)
        given = Updated()
        for metric, name in ((given, "Updated"), (Updated, "Updated"), (lambda: Updated(), "<lambda>")):
            hook = MetricHook(metric)
            assert hook.name == name
            one, two = (hook.make(trainer)._metric for _ in range(2))  # type: ignore[attr-defined]
            assert len({id(one), id(two), id(given)}) == 3
        assert MetricHook(given, "mine").name == "mine"
        seen: Any = Updated()
        hook.measure(seen, trainer, None, None, None)
        hook.measure(seen, trainer, torch.ones(1, requires_grad=True), "label", None)
        hook.measure(seen, trainer, {"a": 1}, "label", None)
        assert [given[1] for given in seen.seen] == ["label", "label"]
        assert not seen.seen[0][0].requires_grad
        assert seen.seen[1][0] == {"a": 1}


def test_a_metric_gives_one_number():
    assert [metrics._number(value) for value in (2, torch.tensor(3.0), torch.tensor([4.0]))] == [2.0, 3.0, 4.0]
    for wrong in (torch.ones(2), torch.ones(0)):
        with pytest.raises(ConfigError, match="a metric must return one number, but it returned a tensor of shape"):
            metrics._number(wrong)

"""Hooks that measure: loss, accuracy, any metric object, throughput, gradient norms; and the learning rate."""

from __future__ import annotations

import copy
import math
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from colonnade.checkpoint.manager import CheckpointManager
from colonnade.comm.messages import gather_from_all
from colonnade.errors import CheckpointError, ConfigError
from colonnade.paths import local_path
from colonnade.registry import HOOKS
from colonnade.trainer.hooks.hook import BaseHook, checked_interval
from colonnade.trainer.metrics import MeanMetric, Metric, StatefulMetric, ValueMetric

if TYPE_CHECKING:
    from colonnade.trainer.records import StepRecord
    from colonnade.trainer.trainer import Trainer


class _Measures(BaseHook, ABC):
    """Keeps a train and a test metric under one name, resets and gathers them at the right points."""

    def __init__(self, name: str, priority: int) -> None:
        super().__init__(priority)
        self.name = name
        self._metrics: dict[str, Any] = {}

    @abstractmethod
    def make(self, trainer: Trainer) -> Metric:
        """A metric: one is made for training and one for testing."""

    @abstractmethod
    def measure(self, metric: Any, trainer: Trainer, output: Any, label: Any, loss: Tensor | None) -> None:
        """Let a metric see a batch; all values are None where this rank has none."""

    def after_hook_is_attached(self, trainer: Trainer) -> None:
        for kind in ("train", "test"):
            self._metrics[kind] = trainer.states["metrics"][kind][self.name] = self.make(trainer)

    def before_train_epoch(self, trainer: Trainer) -> None:
        self._metrics["train"].reset()

    def before_test_epoch(self, trainer: Trainer) -> None:
        self._metrics["test"].reset()

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Tensor | None) -> None:
        self.measure(self._metrics["train"], trainer, output, label, loss)

    def after_test_iter(self, trainer: Trainer, output: Any, label: Any, loss: Tensor | None) -> None:
        self.measure(self._metrics["test"], trainer, output, label, loss)

    def after_train_epoch(self, trainer: Trainer) -> None:
        self._metrics["train"].gather()

    def after_test_epoch(self, trainer: Trainer) -> None:
        self._metrics["test"].gather()

    def state_dict(self) -> dict[str, Any]:
        return {kind: metric.state_dict() for kind, metric in self._metrics.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for kind, metric in self._metrics.items():
            if state[kind]:
                metric.load_state_dict(state[kind])


@HOOKS.register_module
class LossHook(_Measures):
    """The mean loss of an epoch, weighted by the rows of each batch, or by what a (sum, count) criterion counts."""

    needs_loss = True

    def __init__(self, priority: int = 0) -> None:
        super().__init__("Loss", priority)

    def make(self, trainer: Trainer) -> Metric:
        return MeanMetric(trainer.context)

    def on_record(self, trainer: Trainer, record: StepRecord) -> None:
        if record.loss is not None:
            self._metrics["train"].update_global(record.loss * record.weight, record.weight)

    def measure(self, metric: Any, trainer: Trainer, output: Any, label: Any, loss: Tensor | None) -> None:
        total, weight = trainer.batch_weight
        if metric is self._metrics["test"] and total is not None:  # records tell that of training
            metric.update(total, weight)


class _NeedsOutput(_Measures):
    def before_train(self, trainer: Trainer) -> None:
        if not trainer.returns_output:
            raise ConfigError(
                f"{type(self).__name__} needs outputs and labels: leave return_output_label=True", code="C092"
            )

    before_test = before_train


@HOOKS.register_module
class AccuracyHook(_NeedsOutput):
    """The part of predictions that are right.

    `accuracy_func(output, label)` returns how many are right, out of the rows of the label, or (right, count). By
    default the largest of the last dimension is the prediction, for every label; of a model of transformers, for every
    label that its loss counts.
    """

    def __init__(self, accuracy_func: Callable[[Any, Any], Any] | None = None, priority: int = 0) -> None:
        super().__init__("Accuracy", priority)
        self._function = accuracy_func

    def make(self, trainer: Trainer) -> Metric:
        return MeanMetric(trainer.context, higher_is_better=True)

    @torch.no_grad()
    def measure(self, metric: Any, trainer: Trainer, output: Any, label: Any, loss: Tensor | None) -> None:
        if output is None:
            return
        if self._function is None:
            if trainer.engine.own_loss is not None:
                output, label = trainer.engine.own_loss.compared(output, label)
            metric.update((output.argmax(dim=-1) == label).sum(), label.numel())
        else:
            found = self._function(output, label)
            metric.update(*(found if isinstance(found, tuple) else (found, len(label))))


@HOOKS.register_module
class MetricHook(_NeedsOutput):
    """Any metric object with update(output, label), compute() and reset(); see `StatefulMetric` for `states`.

    `metric` is an object, of which training and testing get a copy each, or a class or function that makes one.
    """

    def __init__(
        self,
        metric: Any,
        name: str | None = None,
        states: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> None:
        made = isinstance(metric, type) or not hasattr(metric, "update")
        self._make: Callable[[], Any] = metric if made else partial(copy.deepcopy, metric)
        super().__init__(name or str(getattr(metric, "__name__", type(metric).__name__)), priority)
        self._states = states

    def make(self, trainer: Trainer) -> Metric:
        metric = self._make()
        if callable(getattr(metric, "to", None)):
            metric = metric.to(trainer.context.device)
        return StatefulMetric(metric, trainer.context, self._states)

    def measure(self, metric: Any, trainer: Trainer, output: Any, label: Any, loss: Tensor | None) -> None:
        if output is not None:
            metric.update(output.detach() if isinstance(output, Tensor) else output, label)


@HOOKS.register_module
class ThroughputHook(BaseHook):
    """Samples per second of all ranks together, as the metric "Throughput" of an epoch.

    The first `ignored_steps` of a run do not count; `tflop_per_step`, of all ranks, adds the metric "TFLOPS".
    """

    def __init__(self, ignored_steps: int = 0, tflop_per_step: float = 0.0, priority: int = 2) -> None:
        super().__init__(priority)
        self._ignored, self._tflop = ignored_steps, tflop_per_step
        self._seen = 0

    def after_hook_is_attached(self, trainer: Trainer) -> None:
        metrics = trainer.states["metrics"]["train"]
        self._rate = metrics["Throughput"] = MeanMetric(trainer.context, higher_is_better=True)
        self._flops = MeanMetric(trainer.context, higher_is_better=True)
        if self._tflop:
            metrics["TFLOPS"] = self._flops

    def before_train_epoch(self, trainer: Trainer) -> None:
        self._rate.reset()
        self._flops.reset()

    def on_record(self, trainer: Trainer, record: StepRecord) -> None:
        self._seen += 1
        if self._seen > self._ignored:
            self._rate.update_global(record.samples, record.seconds)
            self._flops.update_global(self._tflop, record.seconds)

    def after_train_epoch(self, trainer: Trainer) -> None:
        self._rate.gather()
        self._flops.gather()


@HOOKS.register_module
class GradientNormHook(BaseHook):
    """Puts the gradient norm of every group, layer or parameter that clipping tells apart into the step's record.

    The names are `grad_norm/<name>`; the global norm is in every record. Only every `interval`-th step, if given.
    """

    def __init__(self, interval: int = 1, priority: int = 10) -> None:
        super().__init__(priority)
        self.interval = checked_interval(interval)

    def after_hook_is_attached(self, trainer: Trainer) -> None:
        if not trainer.engine.may_skip:
            raise ConfigError(
                "GradientNormHook reads the norms that clipping computes; set clip_grad_norm in the config, to infinity "
                "if nothing is to be clipped",
                code="C092",
            )

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Tensor | None) -> None:
        if trainer.step_done and trainer.cur_step % self.interval == 0:
            norms = trainer.engine.grad_norms()
            if len(norms) > 1:
                trainer.log({f"grad_norm/{name}": norm for name, norm in norms.items()})

    def on_record(self, trainer: Trainer, record: StepRecord) -> None:
        if record.grad_norm is not None:
            trainer.states["grad_norm"] = record.grad_norm


@HOOKS.register_module
class LRSchedulerHook(BaseHook):
    """Steps a learning-rate scheduler after every optimizer step, or `by_epoch` after every epoch.

    With `store_lr_in_state` the rate is the metric "LR". The state of the scheduler is part of checkpoints.
    """

    def __init__(self, lr_scheduler: Any, by_epoch: bool, store_lr_in_state: bool = True, priority: int = 1) -> None:
        super().__init__(priority)
        self.lr_scheduler = lr_scheduler
        self.by_epoch = by_epoch
        self._metric = ValueMetric() if store_lr_in_state else None

    def after_hook_is_attached(self, trainer: Trainer) -> None:
        if self._metric is not None:
            trainer.states["metrics"]["train"]["LR"] = self._metric
            self._store()

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Tensor | None) -> None:
        if not self.by_epoch and trainer.step_done:
            self._step()

    def after_train_epoch(self, trainer: Trainer) -> None:
        if self.by_epoch and trainer.epoch_done:
            self._step()

    def state_dict(self) -> dict[str, Any]:
        return dict(self.lr_scheduler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.lr_scheduler.load_state_dict(state)
        self._store()

    def _step(self) -> None:
        self.lr_scheduler.step()
        self._store()

    def _store(self) -> None:
        if self._metric is not None:
            self._metric.value = float(next(iter(self.lr_scheduler.get_last_lr())))


# --------------------------------------------------------------------------------------------------
# Hooks that look closer: an evaluation every so many steps, a search for the learning rate.
# --------------------------------------------------------------------------------------------------


@HOOKS.register_module
class EvaluateHook(BaseHook):
    """Evaluates on `dataloader` after every `interval` steps, with the hooks of the run. Beside `fit(test_dataloader=)`,
    which counts epochs; an EarlyStopHook counts both."""

    def __init__(self, dataloader: Iterable[Any], interval: int, priority: int = 90) -> None:
        super().__init__(priority)
        self.dataloader, self.interval = dataloader, checked_interval(interval)

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Tensor | None) -> None:
        if trainer.step_done and trainer.cur_step % self.interval == 0:
            learnt = trainer.batch_weight
            trainer.evaluate(self.dataloader, return_output_label=trainer.returns_output)
            trainer.batch_weight = learnt


@HOOKS.register_module
class LRFinderHook(BaseHook):
    """Tries learning rates from `start` to `end` over the steps of one `fit`, then puts everything back as it was.

    `trainer.fit(loader, max_steps=100, hooks=[finder])`, then `finder.suggestion`: the rate at which the smoothed loss fell
    fastest, and `finder.rates` and `finder.losses` to draw. It stops early where the loss is `stop_at` times its best. Weights,
    optimizer and random streams are kept in `folder` meanwhile, a new or empty one which all ranks must see.
    """

    def __init__(
        self,
        start: float = 1e-7,
        end: float = 10.0,
        stop_at: float = 4.0,
        folder: str | Path = "lr_finder",
        priority: int = 1000,
    ) -> None:
        super().__init__(priority)
        if not 0 < start < end or stop_at <= 1:
            raise ConfigError(
                f"LRFinderHook: start={start} is above 0 and below end={end}; stop_at={stop_at} is above 1", code="C092"
            )
        self.start, self.end, self.stop_at, self.folder = (
            start,
            end,
            stop_at,
            local_path(folder, f"{type(self).__name__}'s folder"),
        )
        self.rates: list[float] = []
        self.losses: list[float] = []
        """Of each step; smoothed, as a running mean over about 20 steps."""
        self._mean = 0.0
        self._first = 0
        self._manager: CheckpointManager | None = None

    @property
    def suggestion(self) -> float | None:
        """The rate of the steepest fall; None where it never fell, or there were too few steps to tell."""
        first, last = len(self.losses) // 10, len(self.losses) - 1
        falls = [(self.losses[at + 1] - self.losses[at - 1], self.rates[at]) for at in range(max(1, first), last)]
        steepest, rate = min(falls, default=(0.0, None))
        return rate if steepest < 0 else None

    def after_hook_is_attached(self, trainer: Trainer) -> None:
        if any(isinstance(hook, LRSchedulerHook) for hook in trainer.hooks):
            raise ConfigError(
                "LRFinderHook sets the learning rate itself: leave the LRSchedulerHook out of this fit", code="C092"
            )

    def before_train(self, trainer: Trainer) -> None:
        if trainer.total_steps is None or trainer.total_steps < trainer.cur_step + 3:
            raise ConfigError(
                "LRFinderHook spreads the rates over the steps of the run: fit(..., max_steps=100)", code="C092"
            )
        # It is removed at the end, so it must be nobody else's. All look before one writes.
        if any(gather_from_all(self.folder.exists() and any(self.folder.iterdir()), trainer.context)):
            raise ConfigError(
                f"LRFinderHook: folder={str(self.folder)!r} is not empty, and it is removed at the end; name a new one",
                code="C092",
            )
        self.rates, self.losses, self._mean = [], [], 0.0
        self._first = trainer.cur_step
        self._manager = CheckpointManager(self.folder, trainer.context)
        self._manager.save(trainer.cur_step, trainer.engine.model, trainer.engine.optimizer, trainer.state_dict())
        self._set_rate(trainer)

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Tensor | None) -> None:
        if trainer.step_done:
            self._set_rate(trainer)

    def on_record(self, trainer: Trainer, record: StepRecord) -> None:
        if record.loss is None or record.lr is None:
            return
        self._mean = 0.9 * self._mean + 0.1 * record.loss
        self.rates.append(record.lr)
        self.losses.append(self._mean / (1 - 0.9 ** len(self.rates)))
        best = min(self.losses)
        if not math.isfinite(record.loss) or record.loss > best + (self.stop_at - 1) * abs(best):
            trainer.request_stop(f"the loss grows at a learning rate of {record.lr:.3g}")

    def after_train(self, trainer: Trainer) -> None:
        if self._manager is None or trainer.failed:
            return
        manager, self._manager = self._manager, None
        trainer.load_state(manager)
        manager.close()
        if trainer.context.get_global_rank() == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
        found = self.suggestion
        trainer.logger.info(
            "no learning rate made the loss fall" if found is None else f"try a learning rate of {found:.3g}"
        )

    def close(self) -> None:
        if self._manager is not None:  # after an error: nothing collective
            self._manager.__exit__(CheckpointError)
            self._manager = None

    def _set_rate(self, trainer: Trainer) -> None:
        assert trainer.total_steps is not None
        part = min(1.0, (trainer.cur_step - self._first) / (trainer.total_steps - 1 - self._first))
        for group in trainer.engine.optimizer.param_groups:
            group["lr"] = self.start * (self.end / self.start) ** part

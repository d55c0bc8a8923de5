"""Hooks for metrics: loss, accuracy, metric objects, throughput, gradient norms and the learning rate."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from colonnade.errors import ConfigError
from colonnade.registry import HOOKS
from colonnade.trainer.hooks.hook import BaseHook, checked_interval
from colonnade.trainer.metrics import MeanMetric, Metric, StatefulMetric, ValueMetric

if TYPE_CHECKING:
    from colonnade.trainer.records import StepRecord
    from colonnade.trainer.trainer import Trainer


class _Measures(BaseHook, ABC):
    """A training metric and a test metric with one name, reset and gathered every epoch."""

    def __init__(self, name: str, priority: int) -> None:
        super().__init__(priority)
        self.name = name
        self._metrics: dict[str, Any] = {}

    @abstractmethod
    def make(self, trainer: Trainer) -> Metric:
        """Create a metric; called once for training and once for testing."""

    @abstractmethod
    def measure(self, metric: Any, trainer: Trainer, output: Any, label: Any, loss: Tensor | None) -> None:
        """Update a metric with a batch; all values are None on a rank without a batch."""

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
    """Computes the mean loss of an epoch, weighted by the rows of each batch, or by the count of a (sum, count) criterion."""

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
        if metric is self._metrics["test"] and total is not None:  # the training loss comes from the records
            metric.update(total, weight)


class _NeedsOutput(_Measures):
    def before_train(self, trainer: Trainer) -> None:
        if not trainer.returns_output:
            raise ConfigError(
                f"{type(self).__name__} needs outputs and labels. Pass return_output_label=True.", code="C092"
            )

    before_test = before_train


@HOOKS.register_module
class AccuracyHook(_NeedsOutput):
    """Computes the fraction of correct predictions.

    Args:
        accuracy_func: function of (output, label) that returns the number of correct rows, or (correct, count). Default: the
            argmax over the last dimension is the prediction of each label; Hugging Face models compare only labels that
            count in the loss.
        priority: hooks with a lower priority run first.
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
    """Computes a metric object with update(output, label), compute() and reset(), such as a torchmetrics metric.

    Args:
        metric: an object, which is copied for training and testing, or a class or function that creates one.
        name: default: the name of the class or function.
        states: as for `StatefulMetric`.
        priority: hooks with a lower priority run first.
    """

    def __init__(
        self,
        metric: Any,
        name: str | None = None,
        states: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> None:
        creates = isinstance(metric, type) or not hasattr(metric, "update")
        self._make: Callable[[], Any] = metric if creates else partial(copy.deepcopy, metric)
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
    """Computes the samples per second over all ranks, as the metric "Throughput" of an epoch.

    Args:
        ignored_steps: the number of steps at the start of a run that do not count.
        tflop_per_step: work of a step over all ranks; if set, there is a metric "TFLOPS".
        priority: hooks with a lower priority run first.
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
    """Adds the gradient norm of every norm group of the clipping config to the record, as `grad_norm/<name>`.

    The global norm is in every record anyway. With `interval`, only every `interval`-th step is recorded.
    """

    def __init__(self, interval: int = 1, priority: int = 10) -> None:
        super().__init__(priority)
        self.interval = checked_interval(interval)

    def after_hook_is_attached(self, trainer: Trainer) -> None:
        if not trainer.engine.may_skip:
            raise ConfigError(
                "GradientNormHook reads the norms that gradient clipping computes, but clip_grad_norm is not set. "
                "Set clip_grad_norm in the config. Set it to infinity to measure without clipping.",
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
    """Steps a learning-rate scheduler after every optimizer step, or with `by_epoch` after every epoch.

    With `store_lr_in_state` there is a metric "LR". Checkpoints contain the state of the scheduler.
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


@HOOKS.register_module
class EvaluateHook(BaseHook):
    """Evaluates on `dataloader` after every `interval` steps, with the hooks of the run.

    `fit(test_dataloader=)` evaluates by epochs instead. An EarlyStopHook counts both kinds of evaluation.
    """

    def __init__(self, dataloader: Iterable[Any], interval: int, priority: int = 90) -> None:
        super().__init__(priority)
        self.dataloader, self.interval = dataloader, checked_interval(interval)

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Tensor | None) -> None:
        if trainer.step_done and trainer.cur_step % self.interval == 0:
            of_training = trainer.batch_weight
            trainer.evaluate(self.dataloader, return_output_label=trainer.returns_output)
            trainer.batch_weight = of_training

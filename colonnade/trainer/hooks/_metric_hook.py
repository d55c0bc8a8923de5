"""Hooks that measure: loss, accuracy, any metric object."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from colonnade.errors import ConfigError
from colonnade.registry import HOOKS
from colonnade.trainer.hooks._base import BaseHook
from colonnade.trainer.metrics import MeanMetric, Metric, StatefulMetric

if TYPE_CHECKING:
    from colonnade.trainer._records import StepRecord
    from colonnade.trainer.trainer import Trainer

Counted = tuple[Tensor | float, Tensor | float]


class _Measures(BaseHook, ABC):
    """Keeps a train and a test metric under one name, resets and gathers them at the right points."""

    def __init__(self, name: str, priority: int) -> None:
        super().__init__(priority)
        self.name = name
        self._metrics: dict[str, Any] = {}

    @abstractmethod
    def make(self, trainer: Trainer, kind: str) -> Metric:
        """The metric of a kind: train or test."""

    def after_hook_is_attached(self, trainer: Trainer) -> None:
        for kind in ("train", "test"):
            self._metrics[kind] = trainer.states["metrics"][kind][self.name] = self.make(trainer, kind)

    def before_train_epoch(self, trainer: Trainer) -> None:
        self._metrics["train"].reset()

    def before_test_epoch(self, trainer: Trainer) -> None:
        self._metrics["test"].reset()

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
    """The mean loss of an epoch, weighted by the rows of each batch, or by what a (sum, count) criterion counts.

    `weight(label)` gives another weight, such as the tokens that count under a pipeline with `loss_weight`.
    """

    def __init__(self, priority: int = 0, weight: Callable[[Any], Tensor | float] | None = None) -> None:
        super().__init__("Loss", priority)
        self._weight = weight

    def make(self, trainer: Trainer, kind: str) -> Metric:
        if trainer.engine.criterion is None:
            raise ConfigError("a LossHook needs a criterion; pass criterion= to initialize")
        return MeanMetric(trainer.context)

    def on_record(self, trainer: Trainer, record: StepRecord) -> None:
        if self._weight is None and record.loss is not None:
            self._metrics["train"].update_global(record.loss * record.weight, record.weight)

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Tensor | None) -> None:
        if self._weight is not None:
            self._update("train", trainer, label, loss)

    def after_test_iter(self, trainer: Trainer, output: Any, label: Any, loss: Tensor | None) -> None:
        self._update("test", trainer, label, loss)

    def _update(self, kind: str, trainer: Trainer, label: Any, loss: Tensor | None) -> None:
        if self._weight is None:
            total, count = trainer.batch_weight
            if total is not None:
                self._metrics[kind].update(total, count)
        elif loss is not None and label is not None:
            count = self._weight(label)
            self._metrics[kind].update(loss.detach() * count, count)


class _NeedsOutput(_Measures):
    def before_train(self, trainer: Trainer) -> None:
        self._check(trainer)

    def before_test(self, trainer: Trainer) -> None:
        self._check(trainer)

    def _check(self, trainer: Trainer) -> None:
        if not trainer.returns_output:
            raise ConfigError(f"{type(self).__name__} needs outputs and labels: leave return_output_label=True")


@HOOKS.register_module
class AccuracyHook(_NeedsOutput):
    """The part of predictions that are right.

    `accuracy_func(output, label)` returns how many are right, out of the rows of the label, or (right, count). By
    default the largest of the last dimension is the prediction, for every label.
    """

    def __init__(self, accuracy_func: Callable[[Any, Any], Any] | None = None, priority: int = 0) -> None:
        super().__init__("Accuracy", priority)
        self._function = accuracy_func

    def make(self, trainer: Trainer, kind: str) -> Metric:
        return MeanMetric(trainer.context, higher_is_better=True)

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Tensor | None) -> None:
        if output is not None:
            self._metrics["train"].update(*self._count(output, label))

    def after_test_iter(self, trainer: Trainer, output: Any, label: Any, loss: Tensor | None) -> None:
        if output is not None:
            self._metrics["test"].update(*self._count(output, label))

    def _count(self, output: Any, label: Any) -> Counted:
        with torch.no_grad():
            if self._function is None:
                return (output.argmax(dim=-1) == label).sum(), label.numel()
            found = self._function(output, label)
        return found if isinstance(found, tuple) else (found, len(label))


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

    def make(self, trainer: Trainer, kind: str) -> Metric:
        metric = self._make()
        if callable(getattr(metric, "to", None)):
            metric = metric.to(trainer.context.device)
        return StatefulMetric(metric, trainer.context, self._states)

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Tensor | None) -> None:
        if output is not None:
            self._metrics["train"].update(_detached(output), label)

    def after_test_iter(self, trainer: Trainer, output: Any, label: Any, loss: Tensor | None) -> None:
        if output is not None:
            self._metrics["test"].update(_detached(output), label)


def _detached(output: Any) -> Any:
    return output.detach() if isinstance(output, Tensor) else output

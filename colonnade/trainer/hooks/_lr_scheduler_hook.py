"""The hook that moves the learning rate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from colonnade.registry import HOOKS
from colonnade.trainer.hooks._base import BaseHook
from colonnade.trainer.metrics import ValueMetric

if TYPE_CHECKING:
    from colonnade.trainer.trainer import Trainer


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
            self._metric.value = float(self.lr_scheduler.get_last_lr()[0])

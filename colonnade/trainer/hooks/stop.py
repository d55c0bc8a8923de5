"""Hooks that stop a run in order: when a signal asks, and when it gets no better."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from colonnade.errors import ConfigError, did_you_mean, listed
from colonnade.registry import HOOKS
from colonnade.trainer.hooks.base import BaseHook

if TYPE_CHECKING:
    from colonnade.trainer.trainer import Trainer


@HOOKS.register_module
class StopOnSignal(BaseHook):
    """Stops the run in order when a signal comes to any rank: all ranks finish the step and save, if a
    SaveCheckpointHook is there; then `fit` ends the process with exit code 75. A second signal ends it at once."""

    def __init__(self, signals: Sequence[int] = (signal.SIGTERM,), priority: int = 10) -> None:
        super().__init__(priority)
        self._signals = tuple(signals)
        self._before: dict[int, Any] = {}
        self._trainer: Trainer | None = None

    def before_train(self, trainer: Trainer) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "StopOnSignal works in the main thread only: Python delivers signals there; call fit there", code="C092"
            )
        self._trainer = trainer
        for number in self._signals:
            self._before[number] = signal.signal(number, self._note)

    def close(self) -> None:
        for number in tuple(self._before):
            self._restore(number)
        self._trainer = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Only notes it: nothing may communicate inside a signal handler."""
        if self._trainer is not None:
            name = signal.Signals(number).name
            self._trainer.request_stop(f"{name} on rank {self._trainer.context.get_global_rank()}", leave=True)
        self._restore(number)

    def _restore(self, number: int) -> None:
        before = self._before.pop(number, None)
        signal.signal(number, before if before is not None else signal.SIG_DFL)


@HOOKS.register_module
class EarlyStopHook(BaseHook):
    """Stops the run when a metric has not got better by `min_delta` for more than `patience` epochs.

    `on` says which: that of the test data, after each evaluation, or of the training data. `mode` is min or max;
    left out, the metric says which.
    """

    def __init__(
        self,
        metric: str = "Loss",
        patience: int = 3,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] | None = None,
        on: Literal["test", "train"] = "test",
        priority: int = 20,
    ) -> None:
        super().__init__(priority)
        if mode not in (None, "min", "max") or on not in ("test", "train") or patience < 0:
            raise ConfigError(
                f"EarlyStopHook: mode={mode!r} is min or max, on={on!r} is test or train, patience from 0 on",
                code="C092",
            )
        self.metric, self.patience, self.min_delta, self.mode, self.on = metric, patience, min_delta, mode, on
        self.best: float | None = None
        self.waited = 0

    def after_train_epoch(self, trainer: Trainer) -> None:
        if self.on == "train" and trainer.epoch_done:
            self._judge(trainer)

    def after_test_epoch(self, trainer: Trainer) -> None:
        if self.on == "test" and trainer.is_fitting:
            self._judge(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.waited = state["best"], state["waited"]

    def _judge(self, trainer: Trainer) -> None:
        metrics = trainer.states["metrics"][self.on]
        if self.metric not in metrics:
            hint = did_you_mean(self.metric, metrics)
            raise ConfigError(
                f"there is no {self.on} metric {self.metric!r}; there are {listed(metrics)}.{hint}", code="C092"
            )
        value = metrics[self.metric].get_accumulated_value()
        if self._is_better(value, metrics[self.metric].higher_is_better):
            self.best, self.waited = value, 0
            return
        self.waited += 1
        if self.waited > self.patience:
            trainer.request_stop(f"{self.on} {self.metric} has not got better for {self.waited} epochs: {self.best:g}")

    def _is_better(self, value: float, higher: bool) -> bool:
        if math.isnan(value):
            return False
        if self.best is None:
            return True
        gain = value - self.best if (self.mode or ("max" if higher else "min")) == "max" else self.best - value
        return gain > self.min_delta

"""Hooks that watch a run: throughput, gradient norms, and whether it still gets better."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from colonnade.errors import ConfigError, did_you_mean, listed
from colonnade.registry import HOOKS
from colonnade.trainer.hooks._base import BaseHook
from colonnade.trainer.metrics import MeanMetric

if TYPE_CHECKING:
    from colonnade.trainer._records import StepRecord
    from colonnade.trainer.trainer import Trainer


@HOOKS.register_module
class ThroughputHook(BaseHook):
    """Samples per second of all ranks together, as the metric "Throughput" of an epoch and of the last step.

    `per_sample` turns samples into another unit: the tokens of one, say. The first `ignored_steps` of a run do not
    count; `tflop_per_step`, of all ranks, adds the metric "TFLOPS".
    """

    def __init__(
        self, ignored_steps: int = 0, tflop_per_step: float = 0.0, per_sample: float = 1.0, priority: int = 2
    ) -> None:
        super().__init__(priority)
        self._ignored, self._tflop, self._per_sample = ignored_steps, tflop_per_step, per_sample
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
            self._rate.update_global(record.samples * self._per_sample, record.seconds)
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
        if interval < 1:
            raise ConfigError(f"interval is a whole number of steps from 1 on, not {interval!r}")
        self.interval = interval

    def after_hook_is_attached(self, trainer: Trainer) -> None:
        if not trainer.engine.may_skip:
            raise ConfigError(
                "GradientNormHook reads the norms that clipping computes; set clip_grad_norm in the config, to infinity "
                "if nothing is to be clipped"
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
class EarlyStopHook(BaseHook):
    """Stops the run when a metric has not got better by `min_delta` for more than `patience` epochs.

    `on` says which: that of the test data, after each evaluation, or of the training data. `mode` is min or max; a
    metric knows it otherwise.
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
                f"EarlyStopHook: mode={mode!r} is min or max, on={on!r} is test or train, patience from 0 on"
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
            raise ConfigError(f"there is no {self.on} metric {self.metric!r}; there are {listed(metrics)}.{hint}")
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

"""Hooks that write to the log: metrics by epoch and by step, times, memory."""

from __future__ import annotations

import resource
import sys
from typing import TYPE_CHECKING, Any

import torch

from colonnade.checkpoint.collective import gather_json
from colonnade.errors import ConfigError
from colonnade.registry import HOOKS
from colonnade.trainer.hooks.base import BaseHook, checked_interval

if TYPE_CHECKING:
    from colonnade.trainer.records import StepRecord
    from colonnade.trainer.trainer import Trainer
    from colonnade.utils.timer import MultiTimer


class LogByEpochHook(BaseHook):
    """Writes a line on rank 0 after every `interval` epochs, to `logger` or else to the trainer's."""

    def __init__(self, logger: Any = None, interval: int = 1, priority: int = 10) -> None:
        super().__init__(priority)
        self.logger, self.interval = logger, checked_interval(interval)

    def write(self, trainer: Trainer, text: str) -> None:
        """One line about this epoch, on rank 0, if it is due."""
        epoch = trainer.cur_epoch + trainer.is_fitting
        if epoch % self.interval == 0 and trainer.context.get_global_rank() == 0:
            (self.logger or trainer.logger).info(f"epoch {epoch} {text}")


@HOOKS.register_module
class LogMetricByEpochHook(LogByEpochHook):
    """Logs the metrics of an epoch over all ranks."""

    def after_train_epoch(self, trainer: Trainer) -> None:
        self._log(trainer, "train")

    def after_test_epoch(self, trainer: Trainer) -> None:
        self._log(trainer, "test")

    def _log(self, trainer: Trainer, kind: str) -> None:
        metrics = trainer.metric_values(kind)
        if metrics:
            self.write(trainer, f"{kind}: {_told(metrics)}")


@HOOKS.register_module
class LogMetricByStepHook(BaseHook):
    """Keeps the numbers of the last step in `trainer.states["step_metrics"]`, and logs every `interval`-th of them."""

    def __init__(self, interval: int | None = None, logger: Any = None, priority: int = 10) -> None:
        super().__init__(priority)
        self.interval, self.logger = interval, logger

    def after_hook_is_attached(self, trainer: Trainer) -> None:
        trainer.states["step_metrics"] = {}

    def on_record(self, trainer: Trainer, record: StepRecord) -> None:
        trainer.states["step_metrics"] = record.numbers()
        due = self.interval is not None and record.step % self.interval == 0
        if due and trainer.context.get_global_rank() == 0:
            (self.logger or trainer.logger).info(f"step {record.step}: {_told(record.numbers())}")


@HOOKS.register_module
class LogTimingByEpochHook(LogByEpochHook):
    """Logs what a timer has measured, of rank 0 and on its clock: the epoch, and the mean of its steps."""

    def __init__(
        self,
        timer: MultiTimer | None = None,
        logger: Any = None,
        interval: int = 1,
        priority: int = 10,
        log_eval: bool = True,
        ignore_num_train_steps: int = 0,
    ) -> None:
        super().__init__(logger, interval, priority)
        self._given, self._log_eval, self._ignore = timer, log_eval, max(0, ignore_num_train_steps)

    def after_hook_is_attached(self, trainer: Trainer) -> None:
        trainer.timer = trainer.timer or self._given
        if trainer.timer is None:
            raise ConfigError("LogTimingByEpochHook needs a timer: Trainer(engine, timer=MultiTimer())", code="C092")

    def after_train_epoch(self, trainer: Trainer) -> None:
        self._log(trainer, "Train")

    def after_test_epoch(self, trainer: Trainer) -> None:
        if self._log_eval:
            self._log(trainer, "Test")

    def _log(self, trainer: Trainer, kind: str) -> None:
        timer = trainer.timer
        assert timer is not None
        steps = timer.get_timer(f"{kind}-step").history[self._ignore :]
        step = f", a step {1000 * sum(steps) / len(steps):.2f} ms" if steps else ""
        spent = timer.get_timer(f"{kind}-epoch").get_elapsed_time()
        self.write(trainer, f"{kind.lower()}: {spent:.2f} s{step}")
        timer.reset(f"{kind}-step")


@HOOKS.register_module
class MemoryHook(LogByEpochHook):
    """Keeps the peak memory of the epoch on the rank that needed most in `trainer.states["memory"]`, in MiB.

    On CUDA the peak of the allocator since the epoch began; elsewhere that of the process since it began.
    """

    def before_train_epoch(self, trainer: Trainer) -> None:
        if trainer.context.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(trainer.context.device)

    def after_train_epoch(self, trainer: Trainer) -> None:
        peaks = gather_json(peak_memory(trainer.context.device), trainer.context)
        trainer.states["memory"] = {"peak": max(peaks), "rank": peaks.index(max(peaks))}


@HOOKS.register_module
class LogMemoryByEpochHook(MemoryHook):
    """A MemoryHook that also writes the peak to the log."""

    def after_train_epoch(self, trainer: Trainer) -> None:
        super().after_train_epoch(trainer)
        found = trainer.states["memory"]
        self.write(trainer, f"memory: {found['peak']:.0f} MiB at most, on rank {found['rank']}")


def _told(numbers: dict[str, float]) -> str:
    return ", ".join(f"{name} = {value:.5g}" for name, value in numbers.items())


def peak_memory(device: torch.device) -> float:
    """MiB of this rank: on CUDA the peak of the allocator since its last reset, elsewhere that of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10

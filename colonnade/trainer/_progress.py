"""Progress for people: a bar where stdout is a terminal, about ten plain lines an epoch elsewhere. Rank 0 alone."""

from __future__ import annotations

import importlib
import os
import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

from colonnade.constants import TERMINAL
from colonnade.trainer.hooks._base import BaseHook

if TYPE_CHECKING:
    from colonnade.trainer._records import StepRecord
    from colonnade.trainer.trainer import Trainer

_LINES_PER_EPOCH = 10
_SECONDS_PER_LINE = 5.0
_COST = 0.003
"""The part of the time that drawing may take."""


class ProgressHook(BaseHook):
    """Shows every step's numbers as they become known; `stream` is stdout unless given."""

    def __init__(self, stream: TextIO | None = None, priority: int = 1000) -> None:
        super().__init__(priority)
        self._stream = stream
        self._display: Bar | Lines | None = None
        self._speed = Speed()

    def before_train(self, trainer: Trainer) -> None:
        if trainer.context.get_global_rank() == 0:
            stream = self._stream or sys.stdout
            width = None if stream.isatty() else _width_elsewhere(stream)
            self._display = Bar(stream, width) if stream.isatty() or width else Lines(stream)

    def on_record(self, trainer: Trainer, record: StepRecord) -> None:
        if self._display is not None:
            self._speed.add(record)
            self._display.show(trainer, record, self._speed)

    def close(self) -> None:
        if self._display is not None:
            self._display.close()
            self._display = None


class Speed:
    """Samples and steps per second, smoothed over the last steps."""

    def __init__(self) -> None:
        self.seconds_per_step = self.samples = 0.0

    def add(self, record: StepRecord) -> None:
        if not self.seconds_per_step:
            self.seconds_per_step, self.samples = record.seconds, float(record.samples)
        self.seconds_per_step += 0.1 * (record.seconds - self.seconds_per_step)
        self.samples += 0.1 * (record.samples - self.samples)

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds_per_step if self.seconds_per_step else 0.0

    def left(self, trainer: Trainer, step: int) -> float | None:
        """The seconds that the run will still take, if its length is known."""
        total = trainer.total_steps
        return (total - step) * self.seconds_per_step if total is not None else None


class Lines:
    """One plain line for every tenth of an epoch; every few seconds where its length is not known."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last = time.monotonic()

    def show(self, trainer: Trainer, record: StepRecord, speed: Speed) -> None:
        if self._is_due(trainer, record):
            self._stream.write(f"{_place(trainer, record)}  {_numbers(trainer, record, speed)}\n")
            self._stream.flush()

    def close(self) -> None:
        """Nothing is open."""

    def _is_due(self, trainer: Trainer, record: StepRecord) -> bool:
        if trainer.steps_per_epoch is not None:
            every = max(1, trainer.steps_per_epoch // _LINES_PER_EPOCH)
            return record.step % every == 0 or record.step == trainer.total_steps
        now = time.monotonic()
        due = now - self._last >= _SECONDS_PER_LINE or record.step == 1
        self._last = now if due else self._last
        return due


class Bar:
    """A bar of rich, drawn as rarely as keeps its cost unnoticeable."""

    def __init__(self, stream: TextIO, width: int | None = None) -> None:
        console = importlib.import_module("rich.console")
        progress = importlib.import_module("rich.progress")
        self._progress: Any = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.TextColumn("{task.fields[numbers]}"),
            console=console.Console(file=stream, force_terminal=True, width=width),
            auto_refresh=False,
        )
        self._progress.start()
        self._task = self._progress.add_task("", numbers="", total=None)
        self._next = 0.0

    def show(self, trainer: Trainer, record: StepRecord, speed: Speed) -> None:
        now = time.monotonic()
        if now >= self._next or record.step == trainer.total_steps:
            self._progress.update(
                self._task,
                total=trainer.total_steps,
                completed=record.step,
                description=_place(trainer, record),
                numbers=_numbers(trainer, record, speed),
                refresh=True,
            )
            self._next = now + max(0.1, (time.monotonic() - now) / _COST)

    def close(self) -> None:
        self._progress.stop()


def _width_elsewhere(stream: TextIO) -> int | None:
    """The width of the launcher's terminal, where a launcher shows there what this stream gets."""
    told = os.environ.get(TERMINAL, "") if stream is sys.stdout else ""
    return int(told) if told.isdigit() else None


def _place(trainer: Trainer, record: StepRecord) -> str:
    epochs = f"/{trainer.max_epochs}" if trainer.max_epochs is not None else ""
    steps = f"/{trainer.total_steps}" if trainer.total_steps is not None else ""
    return f"epoch {record.epoch + 1}{epochs}  step {record.step}{steps}"


def _numbers(trainer: Trainer, record: StepRecord, speed: Speed) -> str:
    parts = [
        f"{name} {value:.4g}"
        for name, value in (("loss", record.loss), ("lr", record.lr), ("norm", record.grad_norm))
        if value is not None
    ]
    parts.append(f"{speed.samples_per_second:.4g} samples/s")
    left = speed.left(trainer, record.step)
    if left is not None:
        parts.append(f"left {int(left) // 3600}:{int(left) // 60 % 60:02d}:{int(left) % 60:02d}")
    return "  ".join(parts)

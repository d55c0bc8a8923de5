"""Progress for people: rich's bar where stdout is a terminal, about ten plain lines an epoch elsewhere. Rank 0 alone."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TextIO

from colonnade.constants import TERMINAL
from colonnade.registry import HOOKS
from colonnade.trainer.hooks.base import BaseHook

if TYPE_CHECKING:
    from colonnade.trainer.records import StepRecord
    from colonnade.trainer.trainer import Trainer

_LINES_PER_EPOCH = 10
_SECONDS_PER_LINE = 5.0
"""Where the length of an epoch is not known."""
_SECONDS_PER_DRAWING = 0.5


@HOOKS.register_module
class ProgressHook(BaseHook):
    """Shows every step's numbers as they become known; `stream` is stdout unless given."""

    def __init__(self, stream: TextIO | None = None, priority: int = 1000) -> None:
        super().__init__(priority)
        self._stream = stream
        self._progress: Any = None

    def before_train(self, trainer: Trainer) -> None:
        if trainer.context.get_global_rank() != 0:
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        stream = self._stream or sys.stdout
        # A launcher may show on its own terminal what this stream gets: it tells the width of that.
        told = os.environ.get(TERMINAL, "") if stream is sys.stdout and not stream.isatty() else ""
        width = int(told) if told.isdigit() else None
        self._draws = stream.isatty() or width is not None
        console = Console(file=stream, force_terminal=self._draws, width=width)
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[numbers]}"))
        # Without a terminal it still keeps the speed and the time that is left.
        self._progress = Progress(*columns, console=console, auto_refresh=False, disable=not self._draws)
        self._progress.start()
        self._task = self._progress.add_task("", numbers="", total=None, completed=trainer.cur_step)
        self._out = stream
        self._last = -_SECONDS_PER_LINE

    def on_record(self, trainer: Trainer, record: StepRecord) -> None:
        if self._progress is None:
            return
        self._progress.update(self._task, total=trainer.total_steps, completed=record.step)
        if not self._is_due(trainer, record):
            return
        self._last = time.monotonic()
        task = self._progress.tasks[0]
        place, numbers = _place(trainer, record), _numbers(record, task.speed, task.time_remaining)
        if self._draws:
            self._progress.update(self._task, description=place, numbers=numbers, refresh=True)
        else:
            self._out.write(f"{place}  {numbers}\n")
            self._out.flush()

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _is_due(self, trainer: Trainer, record: StepRecord) -> bool:
        if record.step == trainer.total_steps:
            return True
        if trainer.steps_per_epoch is not None and not self._draws:
            return record.step % max(1, trainer.steps_per_epoch // _LINES_PER_EPOCH) == 0
        return time.monotonic() - self._last >= (_SECONDS_PER_DRAWING if self._draws else _SECONDS_PER_LINE)


def _place(trainer: Trainer, record: StepRecord) -> str:
    epochs = f"/{trainer.max_epochs}" if trainer.max_epochs is not None else ""
    steps = f"/{trainer.total_steps}" if trainer.total_steps is not None else ""
    return f"epoch {record.epoch + 1}{epochs}  step {record.step}{steps}"


def _numbers(record: StepRecord, speed: float | None, left: float | None) -> str:
    known = (("loss", record.loss), ("lr", record.lr), ("norm", record.grad_norm))
    parts = [f"{name} {value:.4g}" for name, value in known if value is not None]
    parts.append(f"{record.samples * (speed or 1 / record.seconds):.4g} samples/s")
    return "  ".join([*parts, f"left {timedelta(seconds=int(left))}"] if left is not None else parts)

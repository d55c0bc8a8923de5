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
_LEAST_BAR = 9
_VALUE = 9
"""As wide as a number gets in four digits: 1.234e-05."""


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
        columns = (TextColumn("{task.description}"), BarColumn(None), TextColumn("{task.fields[numbers]}"))
        # Without a terminal it still keeps the speed and the time that is left.
        self._progress = Progress(*columns, console=console, auto_refresh=False, disable=not self._draws, expand=True)
        self._width = console.width if self._draws else None
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
        place = _place(trainer, record)
        room = self._width - len(place) - _LEAST_BAR - 2 if self._width is not None else None
        numbers = _numbers(record, task.speed, task.time_remaining, room)
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
    """Where it is; always as wide, where the end is known."""
    return f"epoch {_of(record.epoch + 1, trainer.max_epochs)}  step {_of(record.step, trainer.total_steps)}"


def _of(number: int, last: int | None) -> str:
    return f"{number}" if last is None else f"{number:>{len(str(last))}}/{last}"


def _numbers(record: StepRecord, speed: float | None, left: float | None, room: int | None) -> str:
    """What is known, as plain words; with `room`, as much of it as fits there in columns that keep their width."""
    rate = f"{record.samples * (speed or 1 / record.seconds):.4g}"
    known = {name: getattr(record, field) for name, field in (("loss", "loss"), ("lr", "lr"), ("norm", "grad_norm"))}
    texts = {name: f"{value:.4g}" for name, value in known.items() if value is not None}
    if room is not None:
        texts, rate = {name: text.ljust(_VALUE) for name, text in texts.items()}, rate.rjust(_VALUE)
    parts = {name: f"{name} {text}" for name, text in texts.items()} | {"rate": f"{rate} samples/s"}
    if left is not None or room is not None:
        parts["left"] = f"left {timedelta(seconds=int(left)) if left is not None else '-:--:--'}"
    shown: list[str] = []
    for name in ("loss", "left", "norm", "rate", "lr"):  # those that matter most
        if name in parts and (room is None or len("  ".join(parts[each] for each in [*shown, name])) <= room):
            shown.append(name)
    return "  ".join(text for name, text in parts.items() if name in shown)

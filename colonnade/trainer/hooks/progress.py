"""Hooks for rank 0: a progress bar on a terminal, or about ten plain lines per epoch elsewhere; and hooks that stop a run."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, TextIO

from colonnade.constants import TERMINAL
from colonnade.errors import ConfigError, did_you_mean, listed
from colonnade.registry import HOOKS
from colonnade.trainer.hooks.hook import BaseHook

if TYPE_CHECKING:
    from colonnade.trainer.records import StepRecord
    from colonnade.trainer.trainer import Trainer


_LINES_PER_EPOCH = 10
_SECONDS_PER_LINE = 5.0
"""Seconds between two lines if the length of an epoch is unknown."""
_SECONDS_PER_DRAWING = 0.5
_SECONDS_OF_ONE_REQUEST = 5.0
"""Signals that come within this time after the first one belong to the same request to stop."""
_LEAST_BAR = 9
_VALUE = 9
"""The maximum width of a number with four digits: 1.234e-05."""


@HOOKS.register_module
class ProgressHook(BaseHook):
    """Prints the progress and the numbers of the steps, to `stream` or stdout."""

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
        # Under a launcher this stream is a pipe, which the launcher copies to its terminal; the variable has its width.
        given = os.environ.get(TERMINAL, "") if stream is sys.stdout and not stream.isatty() else ""
        width = int(given) if given.isdigit() else None
        self._draws = stream.isatty() or width is not None
        console = Console(file=stream, force_terminal=self._draws, width=width)
        columns = (TextColumn("{task.description}"), BarColumn(None), TextColumn("{task.fields[numbers]}"))
        # Without a terminal nothing is drawn, but the object still computes speed and remaining time.
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
        # The last step is always shown; else by time, or by steps in a plain log of a known length.
        if trainer.steps_per_epoch is not None and not self._draws:
            due = record.step % max(1, trainer.steps_per_epoch // _LINES_PER_EPOCH) == 0
        else:
            due = time.monotonic() - self._last >= (_SECONDS_PER_DRAWING if self._draws else _SECONDS_PER_LINE)
        if not due and record.step != trainer.total_steps:
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


def _place(trainer: Trainer, record: StepRecord) -> str:
    """Epoch and step, of constant width if the end is known."""
    return f"epoch {_of(record.epoch + 1, trainer.max_epochs)}  step {_of(record.step, trainer.total_steps)}"


def _of(number: int, last: int | None) -> str:
    return f"{number}" if last is None else f"{number:>{len(str(last))}}/{last}"


def _numbers(record: StepRecord, speed: float | None, left: float | None, room: int | None) -> str:
    """The known numbers as text. With `room`, only the numbers that fit, in columns of constant width."""
    rate = f"{record.samples * (speed or 1 / record.seconds):.4g}"
    known = {name: getattr(record, field) for name, field in (("loss", "loss"), ("lr", "lr"), ("norm", "grad_norm"))}
    texts = {name: f"{value:.4g}" for name, value in known.items() if value is not None}
    if room is not None:
        texts, rate = {name: text.ljust(_VALUE) for name, text in texts.items()}, rate.rjust(_VALUE)
    parts = {name: f"{name} {text}" for name, text in texts.items()} | {"rate": f"{rate} samples/s"}
    if left is not None or room is not None:
        parts["left"] = f"left {timedelta(seconds=int(left)) if left is not None else '-:--:--'}"
    shown: list[str] = []
    for name in ("loss", "left", "norm", "rate", "lr"):  # the most important first
        if name in parts and (room is None or len("  ".join(parts[each] for each in [*shown, name])) <= room):
            shown.append(name)
    return "  ".join(text for name, text in parts.items() if name in shown)


# --- Hooks that stop a run in order ---


@HOOKS.register_module
class StopOnSignal(BaseHook):
    """Stops all ranks after the current step if any rank receives a signal.

    If there is a SaveCheckpointHook, the ranks save a checkpoint. Then `fit` exits the process with code 75. A signal that comes
    more than 5 seconds after the first one ends the process at once.
    """

    def __init__(self, signals: Sequence[int] = (signal.SIGTERM,), priority: int = 10) -> None:
        super().__init__(priority)
        self._signals = tuple(signals)
        self._before: dict[int, Any] = {}
        self._trainer: Trainer | None = None
        self._first: float | None = None

    def before_train(self, trainer: Trainer) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "StopOnSignal needs the main thread, because Python delivers signals only there. Call fit in the "
                "main thread.",
                code="C092",
            )
        self._trainer, self._first = trainer, None
        for number in self._signals:
            self._before[number] = signal.signal(number, self._note)

    def close(self) -> None:
        for number in tuple(self._before):
            self._restore(number)
        self._trainer = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Request the stop only: a signal handler must not communicate."""
        # A scheduler that signals launcher and ranks together makes two signals of one request, because the launcher sends the
        # signal on. The second one must not end the process before it has saved.
        if self._trainer is None:  # the signal came while the hook was closed
            return
        now = time.monotonic()
        if self._first is not None and now - self._first > _SECONDS_OF_ONE_REQUEST:
            self._restore(number)
            signal.raise_signal(number)
        elif self._first is None:
            self._first, name = now, signal.Signals(number).name
            self._trainer.request_stop(f"{name} on rank {self._trainer.context.get_global_rank()}", leave=True)

    def _restore(self, number: int) -> None:
        before = self._before.pop(number, None)
        signal.signal(number, before if before is not None else signal.SIG_DFL)


@HOOKS.register_module
class EarlyStopHook(BaseHook):
    """Stops the run if a metric has not improved by `min_delta` for more than `patience` epochs.

    Args:
        metric: the name of the metric.
        patience: the number of epochs (or evaluations) without improvement before the run stops.
        min_delta: the smallest change that counts as an improvement.
        mode: "min" or "max". Default: as the metric declares.
        on: "test", after each evaluation, or "train", after each epoch.
        priority: hooks with a lower priority run first.
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
                f"EarlyStopHook got mode={mode!r}, on={on!r} and patience={patience!r}. mode must be 'min', 'max' or "
                "None, on must be 'test' or 'train', and patience must be at least 0.",
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
                f"there is no {self.on} metric {self.metric!r}. The metrics are {listed(metrics)}.{hint}", code="C092"
            )
        value, higher = metrics[self.metric].get_accumulated_value(), metrics[self.metric].higher_is_better
        if self._is_better(value, higher):
            self.best, self.waited = value, 0
            return
        self.waited += 1
        if self.waited > self.patience:
            trainer.request_stop(
                f"{self.on} {self.metric} has not improved for {self.waited} epochs; best: {self.best:g}"
            )

    def _is_better(self, value: float, higher: bool) -> bool:
        if math.isnan(value):
            return False
        sign = 1 if (self.mode or ("max" if higher else "min")) == "max" else -1
        return self.best is None or sign * (value - self.best) > self.min_delta

"""Hooks that write every step to a file, one flushed line each, and go on after a resume without a line twice."""

from __future__ import annotations

import csv
import io
import json
import math
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from colonnade.errors import ConfigError
from colonnade.registry import HOOKS
from colonnade.trainer.hooks._base import BaseHook

if TYPE_CHECKING:
    from colonnade.trainer._records import StepRecord
    from colonnade.trainer.trainer import Trainer


class _Lines(BaseHook, ABC):
    """One file, written on rank 0.

    A run that begins anew puts an older file of that name aside, as `<name>.1`; one that is resumed cuts off the
    lines of steps that it is going to make again, and a last line that was not finished.
    """

    def __init__(self, path: str | Path, priority: int = 10) -> None:
        super().__init__(priority)
        self.path = Path(path)
        self._file: TextIO | None = None

    @abstractmethod
    def kept(self, lines: list[str], trainer: Trainer) -> list[str]:
        """The lines of an older file that this run will not write again."""

    def before_train(self, trainer: Trainer) -> None:
        if trainer.context.get_global_rank() != 0:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept: list[str] = []
        if self.path.exists():
            if trainer.cur_step == 0:
                self.path.rename(_free_name(self.path))
            else:
                kept = self.kept(self.path.read_text(encoding="utf-8").splitlines(keepends=True), trainer)
        # A new file under the old name: a kill while it is written leaves the old one.
        fresh = self.path.with_name(self.path.name + ".new")
        fresh.write_text("".join(kept), encoding="utf-8")
        fresh.replace(self.path)
        self._file = self.path.open("a", encoding="utf-8", newline="")

    def write(self, line: str) -> None:
        """One line, on disk as far as the system is concerned when this returns."""
        if self._file is not None:
            self._file.write(line)
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


@HOOKS.register_module
class JsonlHook(_Lines):
    """One JSON object a line: every step's record, and the metrics of every epoch and evaluation.

    Lines have `kind` (step, train or test), `step` and `epoch`; what is not finite is null.
    """

    def on_record(self, trainer: Trainer, record: StepRecord) -> None:
        self._put("step", record.step, record.epoch, record.numbers())

    def after_train_epoch(self, trainer: Trainer) -> None:
        self._put("train", trainer.cur_step, trainer.cur_epoch, _metrics(trainer, "train"))

    def after_test_epoch(self, trainer: Trainer) -> None:
        self._put("test", trainer.cur_step, trainer.cur_epoch, _metrics(trainer, "test"))

    def kept(self, lines: list[str], trainer: Trainer) -> list[str]:
        return [line for line in lines if line.endswith("\n") and _is_behind(line, trainer)]

    def _put(self, kind: str, step: int, epoch: int, numbers: dict[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        self.write(json.dumps({"kind": kind, "step": step, "epoch": epoch, **finite}) + "\n")


@HOOKS.register_module
class CsvHook(_Lines):
    """Every step as a row, in the columns step, epoch, loss, lr, grad_norm, samples and seconds, and `columns`: names
    of other numbers of a record."""

    def __init__(self, path: str | Path, columns: tuple[str, ...] = (), priority: int = 10) -> None:
        super().__init__(path, priority)
        self._columns = ["loss", "lr", "grad_norm", "samples", "seconds", *columns]

    def before_train(self, trainer: Trainer) -> None:
        super().before_train(trainer)
        if self._file is not None and self._file.tell() == 0:
            self.write(_row(["step", "epoch", *self._columns]))

    def on_record(self, trainer: Trainer, record: StepRecord) -> None:
        numbers = record.numbers()
        self.write(_row([record.step, record.epoch, *(numbers.get(name, "") for name in self._columns)]))

    def kept(self, lines: list[str], trainer: Trainer) -> list[str]:
        expected = _row(["step", "epoch", *self._columns])
        if lines and lines[0] != expected:
            raise ConfigError(f"{self.path} has other columns ({lines[0].strip()}) than this run; give another path")
        rows = [line for line in lines[1:] if line.endswith("\n") and line.partition(",")[0].isdigit()]
        return lines[:1] + [line for line in rows if int(line.partition(",")[0]) <= trainer.cur_step]


def _is_behind(line: str, trainer: Trainer) -> bool:
    """Whether a line is of something that the trainer will not do again."""
    try:
        entry = json.loads(line)
        kind, step, epoch = entry["kind"], entry["step"], entry["epoch"]
    except (ValueError, KeyError, TypeError):
        return False
    if kind == "step":
        return bool(step <= trainer.cur_step)
    return bool(epoch < trainer.cur_epoch + (kind == "train" and trainer.epoch_done))


def _metrics(trainer: Trainer, kind: str) -> dict[str, float]:
    return {name: metric.get_accumulated_value() for name, metric in trainer.states["metrics"][kind].items()}


def _row(cells: list[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def _free_name(path: Path) -> Path:
    number = 1
    while (other := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return other

"""Hooks that write the numbers of a run: to files, one flushed line each, and to trackers. Rank 0 writes."""

from __future__ import annotations

import csv
import importlib
import io
import json
import math
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from colonnade.errors import ConfigError
from colonnade.registry import HOOKS
from colonnade.trainer.hooks.base import BaseHook, checked_interval

if TYPE_CHECKING:
    from colonnade.trainer.records import StepRecord
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
        self._put("train", trainer.cur_step, trainer.cur_epoch, trainer.metric_values("train"))

    def after_test_epoch(self, trainer: Trainer) -> None:
        self._put("test", trainer.cur_step, trainer.cur_epoch, trainer.metric_values("test"))

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
            raise ConfigError(
                f"{self.path} has other columns ({lines[0].strip()}) than this run; give another path", code="C092"
            )
        rows = [line for line in lines[1:] if line.endswith("\n") and line.partition(",")[0].isdigit()]
        return lines[:1] + [line for line in rows if int(line.partition(",")[0]) <= trainer.cur_step]


class _Tracker(BaseHook, ABC):
    """Sends the numbers of every `interval`-th step, and the metrics of every epoch and evaluation."""

    package = ""
    needs = ""
    """What to install when the package is missing."""

    def __init__(self, interval: int = 1, priority: int = 10) -> None:
        super().__init__(priority)
        self.interval = checked_interval(interval)
        self._writer: Any = None

    @abstractmethod
    def open(self, package: Any) -> Any:
        """What to write to, on rank 0."""

    @abstractmethod
    def send(self, numbers: dict[str, float], step: int) -> None:
        """Give numbers to the tracker."""

    @abstractmethod
    def end(self) -> None:
        """Nothing more will be sent."""

    def close(self) -> None:
        if self._writer is not None:
            self.end()
            self._writer = None

    def after_hook_is_attached(self, trainer: Trainer) -> None:
        self._import()

    def before_train(self, trainer: Trainer) -> None:
        if trainer.context.get_global_rank() == 0:
            self._writer = self.open(self._import())

    def on_record(self, trainer: Trainer, record: StepRecord) -> None:
        if self._writer is not None and record.step % self.interval == 0:
            self.send({f"step/{name}": value for name, value in record.numbers().items()}, record.step)

    def after_train_epoch(self, trainer: Trainer) -> None:
        self._send_metrics(trainer, "train")

    def after_test_epoch(self, trainer: Trainer) -> None:
        self._send_metrics(trainer, "test")

    def _send_metrics(self, trainer: Trainer, kind: str) -> None:
        if self._writer is not None:
            metrics = trainer.metric_values(kind).items()
            self.send({f"{kind}/{name}": value for name, value in metrics}, trainer.cur_step)

    def _import(self) -> Any:
        try:
            return importlib.import_module(self.package)
        except ImportError as error:
            raise ConfigError(
                f"{type(self).__name__} needs {self.needs}, which is not installed here ({error}): "
                f"pip install {self.needs}, or use JsonlHook, which needs nothing",
                code="C024",
            ) from error


@HOOKS.register_module
class TensorBoardHook(_Tracker):
    """Writes to TensorBoard's files in `folder`."""

    package, needs = "torch.utils.tensorboard", "tensorboard"

    def __init__(self, folder: str | Path, interval: int = 1, priority: int = 10) -> None:
        super().__init__(interval, priority)
        self.folder = Path(folder)

    def open(self, package: Any) -> Any:
        return package.SummaryWriter(str(self.folder))

    def send(self, numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def end(self) -> None:
        self._writer.close()


@HOOKS.register_module
class WandbHook(_Tracker):
    """Sends to Weights & Biases; other arguments are those of `wandb.init`."""

    package = needs = "wandb"

    def __init__(self, project: str, interval: int = 1, priority: int = 10, **options: Any) -> None:
        super().__init__(interval, priority)
        self._options = {"project": project, **options}

    def open(self, package: Any) -> Any:
        return package.init(**self._options)

    def send(self, numbers: dict[str, float], step: int) -> None:
        self._writer.log({**numbers, "step": step})

    def end(self) -> None:
        self._writer.finish()


def _is_behind(line: str, trainer: Trainer) -> bool:
    """Whether a line is of something that the trainer will not do again."""
    try:
        entry = json.loads(line)
        kind, step, epoch = entry["kind"], entry["step"], entry["epoch"]
    except (ValueError, KeyError, TypeError):
        return False
    if kind == "step":
        return bool(step <= trainer.cur_step)
    if kind == "test" and epoch == trainer.cur_epoch:  # an EvaluateHook's; that of the whole epoch is made again
        return bool(step < trainer.cur_step + (not trainer.epoch_done))
    return bool(epoch < trainer.cur_epoch + (kind == "train" and trainer.epoch_done))


def _row(cells: list[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def _free_name(path: Path) -> Path:
    number = 1
    while (other := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return other

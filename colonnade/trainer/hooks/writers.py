"""Hooks that write the numbers of a run to files, one flushed line each. Rank 0 writes."""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from torch import Tensor

from colonnade.errors import ConfigError
from colonnade.logging import get_dist_logger
from colonnade.paths import local_path
from colonnade.registry import HOOKS
from colonnade.trainer.hooks.base import BaseHook
from colonnade.trainer.hooks.log import peak_memory
from colonnade.trainer.hooks.run_facts import run_facts

if TYPE_CHECKING:
    from colonnade.trainer.records import StepRecord
    from colonnade.trainer.trainer import Trainer

_SECONDS_PER_MEMORY = 1.0


class _Lines(BaseHook, ABC):
    """One file, written on rank 0.

    A run that begins anew puts an older file of that name aside, as `<name>.1`; one that is resumed cuts off the
    lines of steps that it is going to make again, and a last line that was not finished.
    """

    def __init__(self, path: str | Path, priority: int) -> None:
        super().__init__(priority)
        self.path = local_path(path, f"{type(self).__name__}'s path")
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

    Lines have `kind`, `step` and `epoch`; what is not finite is null. Kinds: `step`; `train` and `test`, the metrics of an epoch
    and of an evaluation; `run`, what the run is, at its start and where it was resumed; `event`, a warning; `end`, when and how
    it ended (finished, stopped, failed), which a run that was killed does not write. Once in a while
    a step has `memory`, the peak so far of rank 0 in MiB. With `report`, the page of the run is written beside the file when
    the run ends (`colonnade report`); if that fails, it is a line in the log.
    """

    def __init__(self, path: str | Path, priority: int = 10, *, report: bool = True) -> None:
        super().__init__(path, priority)
        self._report, self._measured, self._warnings = report, 0.0, _Warnings(self)

    def before_train(self, trainer: Trainer) -> None:
        self._warnings.trainer, self._ended = trainer, False
        super().before_train(trainer)
        if self._file is not None:
            self._put("run", trainer.cur_step, trainer.cur_epoch, {**run_facts(trainer), "made_again": self._cut})
            logging.getLogger("colonnade").addHandler(self._warnings)

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Tensor | None) -> None:
        now = time.monotonic()
        if self._file is not None and trainer.step_done and now - self._measured > _SECONDS_PER_MEMORY:
            self._measured = now
            trainer.log({"memory": peak_memory(trainer.context.device)})

    def on_record(self, trainer: Trainer, record: StepRecord) -> None:
        self._put("step", record.step, record.epoch, record.numbers())

    def after_train(self, trainer: Trainer) -> None:
        how = "failed" if trainer.failed else "stopped" if trainer.stopping else "finished"
        self._end(how, trainer.stop_reason)

    def close(self) -> None:
        logging.getLogger("colonnade").removeHandler(self._warnings)
        written = self._file is not None
        if not self._ended:  # by an error that is this rank's alone
            self._end("failed", "")
        super().close()
        if written and self._report:
            self._write_report()

    def after_train_epoch(self, trainer: Trainer) -> None:
        self._put("train", trainer.cur_step, trainer.cur_epoch, trainer.metric_values("train"))

    def after_test_epoch(self, trainer: Trainer) -> None:
        self._put("test", trainer.cur_step, trainer.cur_epoch, trainer.metric_values("test"))

    def kept(self, lines: list[str], trainer: Trainer) -> list[str]:
        kept = _behind(lines, trainer)
        self._cut = sum('"kind": "step"' in line for line in lines) - sum('"kind": "step"' in line for line in kept)
        return kept

    def _end(self, how: str, reason: str) -> None:
        self._ended, trainer = True, self._warnings.trainer
        if trainer is not None:
            self._put("end", trainer.cur_step, trainer.cur_epoch, {"time": time.time(), "how": how, "reason": reason})

    _ended = False
    _cut = 0
    """How many steps of an older file this run makes again."""

    def _put(self, kind: str, step: int, epoch: int, values: dict[str, Any]) -> None:
        told = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }
        self.write(json.dumps({"kind": kind, "step": step, "epoch": epoch, **told}) + "\n")

    def _write_report(self) -> None:
        try:
            from colonnade.report import write_run_page

            write_run_page([self.path], self.path.with_suffix(".html"))
        except Exception as error:  # the run is done: a page is no reason to fail it
            get_dist_logger().warning(f"the page of the run was not written: {type(error).__name__}: {error}")


class _Warnings(logging.Handler):
    """Puts the warnings of this rank into the log as events, with the step they came in."""

    def __init__(self, hook: JsonlHook) -> None:
        super().__init__(logging.WARNING)
        self._hook = hook
        self.trainer: Trainer | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if self.trainer is not None:
            self._hook._put(
                "event",
                self.trainer.cur_step,
                self.trainer.cur_epoch,
                {"time": record.created, "level": record.levelname.lower(), "text": record.getMessage()},
            )


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
        rows = [line for line in lines if line.endswith("\n") and line.partition(",")[0].isdigit()]
        return lines[:1] + [line for line in rows if int(line.partition(",")[0]) <= trainer.cur_step]


def _behind(lines: list[str], trainer: Trainer) -> list[str]:
    """The lines of what the trainer will not do again. The evaluation at the end of an epoch comes after its `train`."""
    kept, ended = [], False
    for line in filter(lambda line: line.endswith("\n"), lines):
        try:
            entry = json.loads(line)
            kind, step, epoch = entry["kind"], entry["step"], entry["epoch"]
        except (ValueError, KeyError, TypeError):
            continue
        here = epoch == trainer.cur_epoch
        ended = ended or (here and kind == "train")
        if (
            kind == "run"
            or epoch < trainer.cur_epoch
            or (kind in ("step", "event") and step <= trainer.cur_step)
            or (kind == "train" and here and trainer.epoch_done)
            or (kind == "test" and here and step <= trainer.cur_step and not ended)
        ):
            kept.append(line)
    return kept


def _row(cells: list[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def _free_name(path: Path) -> Path:
    number = 1
    while (other := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return other

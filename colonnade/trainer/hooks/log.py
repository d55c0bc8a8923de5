"""Hooks that write to the log: metrics by epoch and by step, times, memory."""

from __future__ import annotations

import csv
import importlib
import io
import json
import logging
import math
import os
import re
import resource
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch
from torch import Tensor

from colonnade.comm.messages import gather_from_all
from colonnade.errors import ConfigError
from colonnade.logging import get_dist_logger
from colonnade.paths import local_path
from colonnade.registry import HOOKS
from colonnade.trainer.hooks.hook import BaseHook, checked_interval
from colonnade.version import __version__

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
        peaks = gather_from_all(peak_memory(trainer.context.device), trainer.context)
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


# --------------------------------------------------------------------------------------------------
# What a run is, as plain values for its log: layout, config, ledger, memory. Read once, before the first step.
# --------------------------------------------------------------------------------------------------


def run_facts(trainer: Trainer) -> dict[str, Any]:
    """What a report says of the run as a whole; of rank 0 where ranks differ."""
    engine, context = trainer.engine, trainer.context
    held = engine.memory()
    return {
        "time": time.time(),
        "colonnade": __version__,
        "torch": torch.__version__,
        "device": _device_name(context.device),
        "world_size": context.world_size,
        "layout": {axis.name: axis.size for axis in context.layout.axes if axis.size > 1},
        "schedule": type(engine.schedule).__name__,
        "accumulation": engine.accumulation,
        "parameters": sum(parameter.numel() for parameter in engine.model.parameters()),
        "memory": {kind: getattr(held, kind).formula or 0 for kind in ("parameters", "gradients", "state")},
        "clip": _clip_level(context.config.get("clip_grad_norm")),
        "config": json.loads(json.dumps(context.config, default=str), parse_constant=str),
        "ledger": [asdict(row) for row in engine.ledger().by_pattern()],
    }


def flat_config(config: Mapping[str, Any], under: str = "") -> dict[str, Any]:
    """The values of a config by dotted names."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{under}{key}"
        flat.update(flat_config(value, f"{name}.") if isinstance(value, Mapping) else {name: value})
    return flat


def _clip_level(setting: Any) -> float | None:
    """The one norm that gradients are clipped to, if there is one."""
    level = setting.get("max_norm") if isinstance(setting, Mapping) and not setting.get("method") else setting
    return float(level) if isinstance(level, (int, float)) and 0 < level < float("inf") else None


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


# --------------------------------------------------------------------------------------------------
# Hooks that write the numbers of a run to files, one flushed line each. Rank 0 writes.
# --------------------------------------------------------------------------------------------------


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
            from colonnade.proof.report import write_run_page

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


# --------------------------------------------------------------------------------------------------
# Hooks that send the numbers of a run to a tracker: TensorBoard, Weights & Biases, MLflow. Rank 0 alone.
# --------------------------------------------------------------------------------------------------


class _Tracker(BaseHook, ABC):
    """Sends the numbers of every `interval`-th step, and the metrics of every epoch and evaluation."""

    package = ""
    needs = ""
    """What to install when the package is missing."""

    def __init__(self, interval: int, priority: int) -> None:
        super().__init__(priority)
        self.interval = checked_interval(interval)
        self._writer: Any = None

    @abstractmethod
    def open(self, package: Any) -> Any:
        """What to write to, on rank 0."""

    def describe(self, trainer: Trainer) -> None:
        """Tell what run this is, once."""

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
            self.describe(trainer)

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
        self.folder = local_path(folder, f"{type(self).__name__}'s folder")

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


@HOOKS.register_module
class MLflowHook(_Tracker):
    """Logs to MLflow: the config as parameters, the numbers as metrics. `uri` is a folder, or what MLflow takes as tracking URI.

    Needs mlflow or mlflow-skinny. Other arguments are those of `mlflow.start_run`.
    """

    package, needs = "mlflow", "mlflow-skinny"

    def __init__(
        self,
        experiment: str,
        uri: str | Path | None = None,
        interval: int = 1,
        priority: int = 10,
        **options: Any,
    ) -> None:
        super().__init__(interval, priority)
        self._experiment, self._options = experiment, options
        is_folder = uri is not None and not re.match("[a-z+]+:|databricks", str(uri))
        self._uri = Path(str(uri)).absolute().as_uri() if is_folder else uri

    def open(self, package: Any) -> Any:
        if self._uri is not None:
            # MLflow refuses folders unless told that they are meant; to give one is to mean it.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            package.set_tracking_uri(self._uri)
        package.set_experiment(self._experiment)
        package.start_run(**self._options)
        return package

    def describe(self, trainer: Trainer) -> None:
        self._writer.log_params({name: str(value)[:500] for name, value in flat_config(trainer.context.config).items()})

    def send(self, numbers: dict[str, float], step: int) -> None:
        self._writer.log_metrics(numbers, step=step)

    def end(self) -> None:
        self._writer.end_run()

"""Hooks that write to the log, to files and to experiment trackers.

A `Sink` receives the record of every step and the metrics of every epoch and evaluation, and writes them on rank 0: log lines, a
JSON or CSV file, TensorBoard, Weights & Biases or MLflow. Memory has separate hooks. `run_facts` is the first line of a JSON file.
"""

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
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.precision import COMPUTED
from colonnade.errors import ConfigError
from colonnade.logging import get_dist_logger
from colonnade.parallel.held import held_tensors
from colonnade.parallel.placement import logical_shape
from colonnade.paths import local_path
from colonnade.registry import HOOKS
from colonnade.texts import flat_config
from colonnade.trainer.hooks.hook import BaseHook, checked_interval
from colonnade.version import __version__

if TYPE_CHECKING:
    from colonnade.trainer.records import StepRecord
    from colonnade.trainer.trainer import Trainer

_SECONDS_PER_MEMORY = 1.0


class Sink(BaseHook, ABC):
    """Base class of hooks that write the numbers of a run to one destination, on rank 0.

    `put` receives numbers of three kinds: "step", the record of a step; "train" and "test", the metrics of an epoch and
    of an evaluation.
    """

    @abstractmethod
    def put(self, trainer: Trainer, kind: str, step: int, epoch: int, numbers: Mapping[str, float]) -> None:
        """Write numbers of one kind; called on rank 0."""

    def on_record(self, trainer: Trainer, record: StepRecord) -> None:
        if trainer.context.get_global_rank() == 0:
            self.put(trainer, "step", record.step, record.epoch, record.numbers())

    def after_train_epoch(self, trainer: Trainer) -> None:
        self._put_metrics(trainer, "train")

    def after_test_epoch(self, trainer: Trainer) -> None:
        self._put_metrics(trainer, "test")

    def _put_metrics(self, trainer: Trainer, kind: str) -> None:
        if trainer.context.get_global_rank() == 0:
            self.put(trainer, kind, trainer.cur_step, trainer.cur_epoch, trainer.metric_values(kind))


# --- Log lines ---


class LogByEpochHook(BaseHook):
    """Logs a line on rank 0 after every `interval` epochs, with `logger` or the logger of the trainer."""

    def __init__(self, logger: Any = None, interval: int = 1, priority: int = 10) -> None:
        super().__init__(priority)
        self.logger, self.interval = logger, checked_interval(interval)

    def write(self, trainer: Trainer, text: str) -> None:
        """Log a line about this epoch on rank 0, if it is one of the `interval`-th epochs."""
        epoch = trainer.cur_epoch + trainer.is_fitting
        if epoch % self.interval == 0 and trainer.context.get_global_rank() == 0:
            (self.logger or trainer.logger).info(f"epoch {epoch} {text}")


@HOOKS.register_module
class LogMetricByEpochHook(LogByEpochHook, Sink):
    """Logs the metrics of an epoch over all ranks."""

    def put(self, trainer: Trainer, kind: str, step: int, epoch: int, numbers: Mapping[str, float]) -> None:
        if kind != "step" and numbers:
            self.write(trainer, f"{kind}: {_as_text(numbers)}")


@HOOKS.register_module
class LogMetricByStepHook(Sink):
    """Stores the numbers of the last step in `trainer.states["step_metrics"]`, and logs those of every `interval`-th step."""

    def __init__(self, interval: int | None = None, logger: Any = None, priority: int = 10) -> None:
        super().__init__(priority)
        self.interval, self.logger = interval, logger

    def after_hook_is_attached(self, trainer: Trainer) -> None:
        trainer.states["step_metrics"] = {}

    def on_record(self, trainer: Trainer, record: StepRecord) -> None:
        trainer.states["step_metrics"] = record.numbers()  # on every rank
        super().on_record(trainer, record)

    def put(self, trainer: Trainer, kind: str, step: int, epoch: int, numbers: Mapping[str, float]) -> None:
        if kind == "step" and self.interval is not None and step % self.interval == 0:
            (self.logger or trainer.logger).info(f"step {step}: {_as_text(numbers)}")


def _as_text(numbers: Mapping[str, float]) -> str:
    return ", ".join(f"{name} = {value:.5g}" for name, value in numbers.items())


@HOOKS.register_module
class MemoryHook(LogByEpochHook):
    """Stores the largest peak memory of any rank in `trainer.states["memory"]`, in MiB, after every epoch.

    On CUDA this is the allocator peak within the epoch, elsewhere the peak of the process since its start.
    """

    def before_train_epoch(self, trainer: Trainer) -> None:
        if trainer.context.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(trainer.context.device)

    def after_train_epoch(self, trainer: Trainer) -> None:
        peaks = gather_from_all(peak_memory(trainer.context.device), trainer.context)
        trainer.states["memory"] = {"peak": max(peaks), "rank": peaks.index(max(peaks))}


@HOOKS.register_module
class LogMemoryByEpochHook(MemoryHook):
    """Stores the peak memory like a MemoryHook, and logs it."""

    def after_train_epoch(self, trainer: Trainer) -> None:
        super().after_train_epoch(trainer)
        found = trainer.states["memory"]
        self.write(trainer, f"memory: peak {found['peak']:.0f} MiB, on rank {found['rank']}")


def peak_memory(device: torch.device) -> float:
    """Return the peak memory of this rank in MiB: on CUDA, of the allocator since its last reset; otherwise, of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


# --- Files, flushed after every line, so that a killed run loses at most the last line ---


class _LineFile(Sink, ABC):
    """One file, written on rank 0.

    A new run renames an existing file to `<name>.1`. A resumed run removes the lines of steps that it is going to repeat, and an
    incomplete last line.
    """

    def __init__(self, path: str | Path, priority: int) -> None:
        super().__init__(priority)
        self.path = local_path(path, f"{type(self).__name__}'s path")
        self._file: TextIO | None = None

    @abstractmethod
    def kept(self, lines: list[str], trainer: Trainer) -> list[str]:
        """Return the lines of an existing file that this run does not write again."""

    def before_train(self, trainer: Trainer) -> None:
        if trainer.context.get_global_rank() != 0:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept: list[str] = []
        if self.path.exists():
            if trainer.cur_step == 0:
                number = 1
                while (backup := self.path.with_name(f"{self.path.name}.{number}")).exists():
                    number += 1
                self.path.rename(backup)
            else:
                kept = self.kept(self.path.read_text(encoding="utf-8").splitlines(keepends=True), trainer)
        # Written under another name and then renamed: if the run is killed here, the old file is intact.
        fresh = self.path.with_name(self.path.name + ".new")
        fresh.write_text("".join(kept), encoding="utf-8")
        fresh.replace(self.path)
        self._file = self.path.open("a", encoding="utf-8", newline="")

    def write(self, line: str) -> None:
        """Write and flush one line."""
        if self._file is not None:
            self._file.write(line)
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


@HOOKS.register_module
class JsonlHook(_LineFile):
    """One JSON object per line: the record of every step, and the metrics of every epoch and evaluation.

    Lines have `kind`, `step` and `epoch`; non-finite numbers are null. Kinds: `step`; `train` and `test`, the metrics of an epoch
    and of an evaluation; `run`, facts about the run, at its start and after a resume; `event`, a warning; `end`, the time and the
    way it ended (finished, stopped, failed), missing after a kill. At most once per second a step has `memory`, the peak of
    rank 0 in MiB. A step of several ranks has `busy/slowest`, `busy/fastest` and `busy/slowest_rank` (`StepRecord.busy`).

    Args:
        path: the file.
        priority: hooks with a lower priority run first.
        report: write the HTML report at the end.
        tflop_per_step: work of a step over all ranks, for the MFU of the report. By default, it is 6 flops for each parameter
            and token; for a model with experts, and for batches without tokens, there is no default.

    With `report`, the HTML report (`colonnade report`) is written next to the file when the run ends; an error
    in it is only logged.
    """

    def __init__(
        self, path: str | Path, priority: int = 10, *, report: bool = True, tflop_per_step: float = 0.0
    ) -> None:
        super().__init__(path, priority)
        self._tflop = tflop_per_step
        self._report, self._measured, self._warnings = report, 0.0, _Warnings(self)
        self._ended = False
        self._cut = 0
        """The number of steps in an existing file that this run repeats."""

    def before_train(self, trainer: Trainer) -> None:
        self._warnings.trainer, self._ended = trainer, False
        world = world_facts(trainer)
        super().before_train(trainer)
        if self._file is not None:
            facts = {**run_facts(trainer), **world, "tflop_per_step": self._tflop, "made_again": self._cut}
            self.put(trainer, "run", trainer.cur_step, trainer.cur_epoch, facts)
            logging.getLogger("colonnade").addHandler(self._warnings)

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Tensor | None) -> None:
        now = time.monotonic()
        if self._file is not None and trainer.step_done and now - self._measured > _SECONDS_PER_MEMORY:
            self._measured = now
            trainer.log({"memory": peak_memory(trainer.context.device)})

    def after_train(self, trainer: Trainer) -> None:
        how = "failed" if trainer.failed else "stopped" if trainer.stopping else "finished"
        self._end(how, trainer.stop_reason)

    def close(self) -> None:
        logging.getLogger("colonnade").removeHandler(self._warnings)
        written = self._file is not None
        if not self._ended:  # by an error on this rank only
            self._end("failed", "")
        super().close()
        if written and self._report:
            try:
                from colonnade.proof.report import write_run_page

                write_run_page([self.path], self.path.with_suffix(".html"))
            except Exception as error:  # the run is complete, and a failed report must not make it fail
                get_dist_logger().warning(f"the report of the run was not written: {type(error).__name__}: {error}")

    def put(self, trainer: Trainer, kind: str, step: int, epoch: int, numbers: Mapping[str, Any]) -> None:
        # JSON has no NaN and no infinity.
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in numbers.items()
        }
        self.write(json.dumps({"kind": kind, "step": step, "epoch": epoch, **finite}) + "\n")

    def kept(self, lines: list[str], trainer: Trainer) -> list[str]:
        kept = _behind(lines, trainer)
        self._cut = sum('"kind": "step"' in line for line in lines) - sum('"kind": "step"' in line for line in kept)
        return kept

    def _end(self, how: str, reason: str) -> None:
        self._ended, trainer = True, self._warnings.trainer
        if trainer is not None:
            facts = {"time": time.time(), "how": how, "reason": reason}
            self.put(trainer, "end", trainer.cur_step, trainer.cur_epoch, facts)


def _behind(lines: list[str], trainer: Trainer) -> list[str]:
    """The lines of work that the trainer does not repeat.

    The evaluation at the end of an epoch comes after the `train` line of that epoch, and is repeated if the epoch is.
    """
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


class _Warnings(logging.Handler):
    """Writes the warnings of this rank to the file as events, with their step."""

    def __init__(self, hook: JsonlHook) -> None:
        super().__init__(logging.WARNING)
        self._hook = hook
        self.trainer: Trainer | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if self.trainer is not None:
            facts = {"time": record.created, "level": record.levelname.lower(), "text": record.getMessage()}
            self._hook.put(self.trainer, "event", self.trainer.cur_step, self.trainer.cur_epoch, facts)


def run_facts(trainer: Trainer) -> dict[str, Any]:
    """Return the facts about a run for its report. If ranks differ, the facts are those of rank 0."""
    engine, context = trainer.engine, trainer.context
    memory = engine.memory()
    return {
        "time": time.time(),
        "colonnade": __version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(context.device) if context.device.type == "cuda" else context.device.type,
        "world_size": context.world_size,
        "layout": {axis.name: axis.size for axis in context.layout.axes if axis.size > 1},
        "schedule": type(engine.schedule).__name__,
        "accumulation": engine.accumulation,
        "dtype": next(iter(engine.precision_table()[COMPUTED].dtypes), ""),
        "command": " ".join(sys.argv),
        "parameters": sum(parameter.numel() for parameter in engine.model.parameters()),
        "memory": {kind: getattr(memory, kind).formula or 0 for kind in ("parameters", "gradients", "state")},
        "clip": _clip_level(context.config.get("clip_grad_norm")),
        "config": json.loads(json.dumps(context.config, default=str), parse_constant=str),
        "ledger": [asdict(row) for row in engine.ledger().by_pattern()],
    }


def world_facts(trainer: Trainer) -> dict[str, Any]:
    """Return the facts that no single rank knows: the parameters of all stages, and the number of devices.

    Collective over the world.
    """
    context, model = trainer.context, trainer.engine.model
    sizes = {mode: context.get_world_size(mode) for mode in context.layout.modes if context.is_initialized(mode)}
    held = held_tensors(model, context)
    counts = [(each, math.prod(logical_shape(each.tensor, each.placement, sizes))) for each in held]
    own = sum(count for each, count in counts if each.placement.tied is None)
    # Tied parameters are in several stages, under the same key.
    tied = {each.label: count for each, count in counts if each.placement.tied is not None}
    # Several ranks may share one device, whose peak then counts once.
    device = context.device
    place = (
        str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else f"{context.get_global_rank()}"
    )
    stage = context.get_local_rank(ParallelMode.PIPELINE) if context.is_initialized(ParallelMode.PIPELINE) else 0
    found = gather_from_all([stage, own, tied, place, any("expert" in each.name for each in held)], context)
    stages = {one[0]: one[1] for one in found}
    shared = {key: count for one in found for key, count in one[2].items()}
    return {
        "elements": sum(stages.values()) + sum(shared.values()),
        "devices": len({one[3] for one in found}),
        "experts": any(one[4] for one in found),
    }


def _clip_level(setting: Any) -> float | None:
    """The norm that gradients are clipped to, if there is a single fixed one."""
    level = setting.get("max_norm") if isinstance(setting, Mapping) and not setting.get("method") else setting
    return float(level) if isinstance(level, (int, float)) and 0 < level < float("inf") else None


@HOOKS.register_module
class CsvHook(_LineFile):
    """Writes one row per step, with the columns step, epoch, loss, lr, grad_norm, samples and seconds.

    `columns` are the names of additional numbers of the record.
    """

    def __init__(self, path: str | Path, columns: tuple[str, ...] = (), priority: int = 10) -> None:
        super().__init__(path, priority)
        self._columns = ["loss", "lr", "grad_norm", "samples", "seconds", *columns]

    def before_train(self, trainer: Trainer) -> None:
        super().before_train(trainer)
        if self._file is not None and self._file.tell() == 0:
            self.write(_row(["step", "epoch", *self._columns]))

    def put(self, trainer: Trainer, kind: str, step: int, epoch: int, numbers: Mapping[str, float]) -> None:
        if kind == "step":
            self.write(_row([step, epoch, *(numbers.get(name, "") for name in self._columns)]))

    def kept(self, lines: list[str], trainer: Trainer) -> list[str]:
        expected = _row(["step", "epoch", *self._columns])
        if lines and lines[0] != expected:
            raise ConfigError(
                f"the columns of {self.path} ({lines[0].strip()}) differ from those of this run. Give another path.",
                code="C092",
            )
        rows = [line for line in lines if line.endswith("\n") and line.partition(",")[0].isdigit()]
        return lines[:1] + [line for line in rows if int(line.partition(",")[0]) <= trainer.cur_step]


def _row(cells: list[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


# --- Trackers ---


class _Tracker(Sink, ABC):
    """Sends the numbers of every `interval`-th step, and the metrics of every epoch and evaluation."""

    package = ""
    needs = ""
    """The package to install."""

    def __init__(self, interval: int, priority: int) -> None:
        super().__init__(priority)
        self.interval = checked_interval(interval)
        self._writer: Any = None

    @abstractmethod
    def open(self, package: Any) -> Any:
        """Open the tracker on rank 0."""

    def describe(self, trainer: Trainer) -> None:
        """Send the description of the run to the tracker, once."""

    @abstractmethod
    def send(self, numbers: dict[str, float], step: int) -> None:
        """Send numbers to the tracker."""

    @abstractmethod
    def end(self) -> None:
        """Close the tracker."""

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

    def put(self, trainer: Trainer, kind: str, step: int, epoch: int, numbers: Mapping[str, float]) -> None:
        if self._writer is not None and (kind != "step" or step % self.interval == 0):
            self.send({f"{kind}/{name}": value for name, value in numbers.items()}, step)

    def _import(self) -> Any:
        try:
            return importlib.import_module(self.package)
        except ImportError as error:
            raise ConfigError(
                f"{type(self).__name__} needs {self.needs}, which is not installed ({error}). Run pip install "
                f"{self.needs}, or use JsonlHook, which needs no package.",
                code="C024",
            ) from error


@HOOKS.register_module
class TensorBoardHook(_Tracker):
    """Writes TensorBoard files to `folder`."""

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
    """Logs to Weights & Biases; further arguments go to `wandb.init`."""

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
    """Logs to MLflow: the config as parameters, the numbers as metrics. Needs mlflow or mlflow-skinny.

    `uri` is a folder or a tracking URI. Further arguments go to `mlflow.start_run`.
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
            # MLflow accepts a folder only with this variable; a user who passes a folder wants it.
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

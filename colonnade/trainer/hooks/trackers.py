"""Hooks that send the numbers of a run to a tracker: TensorBoard, Weights & Biases, MLflow. Rank 0 alone."""

from __future__ import annotations

import importlib
import os
import re
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colonnade.errors import ConfigError
from colonnade.paths import local_path
from colonnade.registry import HOOKS
from colonnade.trainer.hooks.base import BaseHook, checked_interval
from colonnade.trainer.hooks.run_facts import flat_config

if TYPE_CHECKING:
    from colonnade.trainer.records import StepRecord
    from colonnade.trainer.trainer import Trainer


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

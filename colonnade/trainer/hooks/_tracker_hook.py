"""Hooks that send the numbers of a run to a tracker, where that tracker is installed; rank 0 writes."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colonnade.errors import ConfigError
from colonnade.registry import HOOKS
from colonnade.trainer.hooks._base import BaseHook

if TYPE_CHECKING:
    from colonnade.trainer._records import StepRecord
    from colonnade.trainer.trainer import Trainer


class _Tracker(BaseHook, ABC):
    """Sends the numbers of every `interval`-th step, and the metrics of every epoch and evaluation."""

    package = ""
    needs = ""
    """What to install when the package is missing."""

    def __init__(self, interval: int = 1, priority: int = 10) -> None:
        super().__init__(priority)
        self.interval = interval
        self._writer: Any = None

    @abstractmethod
    def open(self, package: Any) -> Any:
        """What to write to, on rank 0."""

    @abstractmethod
    def send(self, numbers: dict[str, float], step: int) -> None:
        """Give numbers to the tracker."""

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
            metrics = trainer.states["metrics"][kind].items()
            self.send({f"{kind}/{name}": metric.get_accumulated_value() for name, metric in metrics}, trainer.cur_step)

    def _import(self) -> Any:
        try:
            return importlib.import_module(self.package)
        except ImportError as error:
            raise ConfigError(
                f"{type(self).__name__} needs {self.needs}, which is not installed here ({error}): "
                f"pip install {self.needs}, or use JsonlHook, which needs nothing"
            ) from error


@HOOKS.register_module
class TensorBoardHook(_Tracker):
    """Writes to TensorBoard's files in `log_dir`."""

    package, needs = "torch.utils.tensorboard", "tensorboard"

    def __init__(self, log_dir: str | Path, interval: int = 1, priority: int = 10) -> None:
        super().__init__(interval, priority)
        self.log_dir = Path(log_dir)

    def open(self, package: Any) -> Any:
        return package.SummaryWriter(str(self.log_dir))

    def send(self, numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


HOOKS.register_module("TensorboardHook")(TensorBoardHook)  # the ancestor's name


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

    def close(self) -> None:
        if self._writer is not None:
            self._writer.finish()
            self._writer = None

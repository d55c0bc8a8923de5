"""Hooks that look closer: an evaluation every so many steps, a search for the learning rate."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from colonnade.checkpoint.collective import gather_json
from colonnade.checkpoint.manager import CheckpointManager
from colonnade.errors import CheckpointError, ConfigError
from colonnade.paths import local_path
from colonnade.registry import HOOKS
from colonnade.trainer.hooks.base import BaseHook, checked_interval
from colonnade.trainer.hooks.metrics import LRSchedulerHook

if TYPE_CHECKING:
    from colonnade.trainer.records import StepRecord
    from colonnade.trainer.trainer import Trainer


@HOOKS.register_module
class EvaluateHook(BaseHook):
    """Evaluates on `dataloader` after every `interval` steps, with the hooks of the run. Beside `fit(test_dataloader=)`,
    which counts epochs; an EarlyStopHook counts both."""

    def __init__(self, dataloader: Iterable[Any], interval: int, priority: int = 90) -> None:
        super().__init__(priority)
        self.dataloader, self.interval = dataloader, checked_interval(interval)

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Tensor | None) -> None:
        if trainer.step_done and trainer.cur_step % self.interval == 0:
            learnt = trainer.batch_weight
            trainer.evaluate(self.dataloader, return_output_label=trainer.returns_output)
            trainer.batch_weight = learnt


@HOOKS.register_module
class LRFinderHook(BaseHook):
    """Tries learning rates from `start` to `end` over the steps of one `fit`, then puts everything back as it was.

    `trainer.fit(loader, max_steps=100, hooks=[finder])`, then `finder.suggestion`: the rate at which the smoothed loss fell
    fastest, and `finder.rates` and `finder.losses` to draw. It stops early where the loss is `stop_at` times its best. Weights,
    optimizer and random streams are kept in `folder` meanwhile, a new or empty one which all ranks must see.
    """

    def __init__(
        self,
        start: float = 1e-7,
        end: float = 10.0,
        stop_at: float = 4.0,
        folder: str | Path = "lr_finder",
        priority: int = 1000,
    ) -> None:
        super().__init__(priority)
        if not 0 < start < end or stop_at <= 1:
            raise ConfigError(
                f"LRFinderHook: start={start} is above 0 and below end={end}; stop_at={stop_at} is above 1", code="C092"
            )
        self.start, self.end, self.stop_at, self.folder = (
            start,
            end,
            stop_at,
            local_path(folder, f"{type(self).__name__}'s folder"),
        )
        self.rates: list[float] = []
        self.losses: list[float] = []
        """Of each step; smoothed, as a running mean over about 20 steps."""
        self._mean = 0.0
        self._first = 0
        self._manager: CheckpointManager | None = None

    @property
    def suggestion(self) -> float | None:
        """The rate of the steepest fall; None where it never fell, or there were too few steps to tell."""
        first, last = len(self.losses) // 10, len(self.losses) - 1
        falls = [(self.losses[at + 1] - self.losses[at - 1], self.rates[at]) for at in range(max(1, first), last)]
        steepest, rate = min(falls, default=(0.0, None))
        return rate if steepest < 0 else None

    def after_hook_is_attached(self, trainer: Trainer) -> None:
        if any(isinstance(hook, LRSchedulerHook) for hook in trainer.hooks):
            raise ConfigError(
                "LRFinderHook sets the learning rate itself: leave the LRSchedulerHook out of this fit", code="C092"
            )

    def before_train(self, trainer: Trainer) -> None:
        if trainer.total_steps is None or trainer.total_steps < trainer.cur_step + 3:
            raise ConfigError(
                "LRFinderHook spreads the rates over the steps of the run: fit(..., max_steps=100)", code="C092"
            )
        # It is removed at the end, so it must be nobody else's. All look before one writes.
        if any(gather_json(self.folder.exists() and any(self.folder.iterdir()), trainer.context)):
            raise ConfigError(
                f"LRFinderHook: folder={str(self.folder)!r} is not empty, and it is removed at the end; name a new one",
                code="C092",
            )
        self.rates, self.losses, self._mean = [], [], 0.0
        self._first = trainer.cur_step
        self._manager = CheckpointManager(self.folder, trainer.context)
        self._manager.save(trainer.cur_step, trainer.engine.model, trainer.engine.optimizer, trainer.state_dict())
        self._set_rate(trainer)

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Tensor | None) -> None:
        if trainer.step_done:
            self._set_rate(trainer)

    def on_record(self, trainer: Trainer, record: StepRecord) -> None:
        if record.loss is None or record.lr is None:
            return
        self._mean = 0.9 * self._mean + 0.1 * record.loss
        self.rates.append(record.lr)
        self.losses.append(self._mean / (1 - 0.9 ** len(self.rates)))
        best = min(self.losses)
        if not math.isfinite(record.loss) or record.loss > best + (self.stop_at - 1) * abs(best):
            trainer.request_stop(f"the loss grows at a learning rate of {record.lr:.3g}")

    def after_train(self, trainer: Trainer) -> None:
        if self._manager is None or trainer.failed:
            return
        manager, self._manager = self._manager, None
        trainer.load_state(manager)
        manager.close()
        if trainer.context.get_global_rank() == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
        found = self.suggestion
        trainer.logger.info(
            "no learning rate made the loss fall" if found is None else f"try a learning rate of {found:.3g}"
        )

    def close(self) -> None:
        if self._manager is not None:  # after an error: nothing collective
            self._manager.__exit__(CheckpointError)
            self._manager = None

    def _set_rate(self, trainer: Trainer) -> None:
        assert trainer.total_steps is not None
        part = min(1.0, (trainer.cur_step - self._first) / (trainer.total_steps - 1 - self._first))
        for group in trainer.engine.optimizer.param_groups:
            group["lr"] = self.start * (self.end / self.start) ** part

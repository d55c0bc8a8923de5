"""Hooks that save checkpoints of a run and go on from them, and the one that stops it when a signal asks."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from colonnade.checkpoint.manager import CheckpointManager
from colonnade.errors import CheckpointError, ConfigError
from colonnade.registry import HOOKS
from colonnade.trainer._reach import gather_json
from colonnade.trainer._resume import resume, trainer_state
from colonnade.trainer.hooks._base import BaseHook

if TYPE_CHECKING:
    from colonnade.trainer.trainer import Trainer


@HOOKS.register_module
class SaveCheckpointHook(BaseHook):
    """Saves everything a run needs to go on to the bit, after every `interval` epochs or (`save_by_iter`) steps.

    Also at the end of the run, when it was asked to stop too. Its priority is late, so that the states of
    other hooks are those after the step. `keep` and `background` are those of the CheckpointManager.
    """

    def __init__(
        self,
        interval: int = 1,
        checkpoint_dir: str | Path = "checkpoints",
        model: nn.Module | None = None,
        save_by_iter: bool = False,
        priority: int = 100,
        *,
        keep: int = 3,
        background: bool = False,
    ) -> None:
        super().__init__(priority)
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            raise ConfigError(f"interval is a whole number of epochs or steps from 1 on, not {interval!r}")
        self.interval, self.checkpoint_dir, self.save_by_iter = interval, Path(checkpoint_dir), save_by_iter
        self._model, self._keep, self._background = model, keep, background
        self._manager: CheckpointManager | None = None
        self._saved: int | None = None

    def before_train(self, trainer: Trainer) -> None:
        self._saved = trainer.cur_step
        self._manager = CheckpointManager(self.checkpoint_dir, trainer.context, self._keep, self._background)

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Tensor | None) -> None:
        if self.save_by_iter and trainer.step_done and trainer.cur_step % self.interval == 0:
            self._save(trainer)

    def after_train_epoch(self, trainer: Trainer) -> None:
        if not self.save_by_iter and trainer.epoch_done and (trainer.cur_epoch + 1) % self.interval == 0:
            self._save(trainer)

    def after_train(self, trainer: Trainer) -> None:
        if self._manager is not None:
            if not trainer.failed:
                self._save(trainer)
            self._manager.close()
            self._manager = None

    def close(self) -> None:
        if self._manager is not None:  # after an error of this rank: nothing collective
            self._manager.__exit__(CheckpointError)
            self._manager = None

    def _save(self, trainer: Trainer) -> None:
        if self._manager is None or self._saved == trainer.cur_step:
            return
        engine = trainer.engine
        extra = trainer_state(trainer)
        self._manager.save(trainer.cur_step, self._model or engine.model, engine.optimizer, extra)
        self._saved = trainer.cur_step


@HOOKS.register_module
class LoadCheckpointHook(BaseHook):
    """Goes on from the newest good checkpoint of a folder, or that of `step`, before anything else happens.

    A run that has none begins anew, unless `required`. The rest of an interrupted epoch is trained as it would have
    been; on another layout with the same samples still to come, and new random streams.
    """

    def __init__(
        self,
        checkpoint_dir: str | Path = "checkpoints",
        step: int | None = None,
        required: bool = False,
        model: nn.Module | None = None,
        priority: int = -100,
    ) -> None:
        super().__init__(priority)
        self.checkpoint_dir, self.step, self.required = Path(checkpoint_dir), step, required
        self._model = model

    def before_train(self, trainer: Trainer) -> None:
        context, engine = trainer.context, trainer.engine
        with CheckpointManager(self.checkpoint_dir, context, read_only=True) as manager:
            seen = manager.steps() if context.get_global_rank() == 0 and self.checkpoint_dir.is_dir() else []
            if not gather_json(bool(seen), context)[0] and not self.required and self.step is None:
                trainer.logger.info(f"no checkpoint in {self.checkpoint_dir}: beginning anew")
                return
            info = manager.load(self._model or engine.model, engine.optimizer, step=self.step)
        resume(trainer, info)


@HOOKS.register_module
class StopOnSignal(BaseHook):
    """Stops the run in order when a signal comes to any rank: all ranks finish the step and save, if a
    SaveCheckpointHook is there; then `fit` ends the process with exit code 75. A second signal ends it at once."""

    def __init__(self, signals: Sequence[int] = (signal.SIGTERM,), priority: int = 10) -> None:
        super().__init__(priority)
        self._signals = tuple(signals)
        self._before: dict[int, Any] = {}
        self._trainer: Trainer | None = None

    def before_train(self, trainer: Trainer) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "StopOnSignal works in the main thread only: Python delivers signals there; call fit there"
            )
        self._trainer = trainer
        for number in self._signals:
            self._before[number] = signal.signal(number, self._note)

    def close(self) -> None:
        for number in tuple(self._before):
            self._restore(number)
        self._trainer = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Only notes it: nothing may communicate inside a signal handler."""
        if self._trainer is not None:
            name = signal.Signals(number).name
            self._trainer.request_stop(f"{name} on rank {self._trainer.context.get_global_rank()}", leave=True)
        self._restore(number)

    def _restore(self, number: int) -> None:
        before = self._before.pop(number, None)
        signal.signal(number, before if before is not None else signal.SIG_DFL)

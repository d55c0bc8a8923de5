"""Hooks that save checkpoints of a run and go on from them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from colonnade.checkpoint.collective import gather_json
from colonnade.checkpoint.manager import CheckpointManager
from colonnade.errors import CheckpointError
from colonnade.paths import local_path
from colonnade.registry import HOOKS
from colonnade.trainer.hooks.base import BaseHook, checked_interval

if TYPE_CHECKING:
    from colonnade.trainer.trainer import Trainer


@HOOKS.register_module
class SaveCheckpointHook(BaseHook):
    """Saves everything a run needs to go on to the bit, after every `interval` epochs, or steps if not `by_epoch`.

    Also at the end of the run, when it was asked to stop too. Its priority is late, so that the states of
    other hooks are those after the step. `keep` and `background` are those of the CheckpointManager.
    """

    def __init__(
        self,
        interval: int = 1,
        folder: str | Path = "checkpoints",
        model: nn.Module | None = None,
        *,
        by_epoch: bool = True,
        priority: int = 100,
        keep: int = 3,
        background: bool = False,
    ) -> None:
        super().__init__(priority)
        self.interval, self.folder, self.by_epoch = (
            checked_interval(interval),
            local_path(folder, f"{type(self).__name__}'s folder", CheckpointError),
            by_epoch,
        )
        self._model, self.keep, self.background = model, keep, background
        self._manager: CheckpointManager | None = None
        self._saved: int | None = None

    def before_train(self, trainer: Trainer) -> None:
        self._saved = trainer.cur_step
        self._manager = CheckpointManager(self.folder, trainer.context, self.keep, self.background)

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Tensor | None) -> None:
        if not self.by_epoch and trainer.step_done and trainer.cur_step % self.interval == 0:
            self._save(trainer)

    def after_train_epoch(self, trainer: Trainer) -> None:
        if self.by_epoch and trainer.epoch_done and (trainer.cur_epoch + 1) % self.interval == 0:
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
        self._manager.save(trainer.cur_step, self._model or engine.model, engine.optimizer, trainer.state_dict())
        self._saved = trainer.cur_step


@HOOKS.register_module
class LoadCheckpointHook(BaseHook):
    """Goes on from the newest good checkpoint of a folder, or that of `step`, before anything else happens.

    A run that has none begins anew, unless `required`. The rest of an interrupted epoch is trained as it would have
    been; on another layout with the same samples still to come, and new random streams.
    """

    def __init__(
        self,
        folder: str | Path = "checkpoints",
        step: int | None = None,
        required: bool = False,
        model: nn.Module | None = None,
        priority: int = -100,
    ) -> None:
        super().__init__(priority)
        self.folder, self.step, self.required = (
            local_path(folder, f"{type(self).__name__}'s folder", CheckpointError),
            step,
            required,
        )
        self._model = model

    def before_train(self, trainer: Trainer) -> None:
        context = trainer.context
        with CheckpointManager(self.folder, context, read_only=True) as manager:
            seen = manager.steps() if context.get_global_rank() == 0 and self.folder.is_dir() else []
            is_there, *_ = gather_json(bool(seen), context)
            if not is_there and not self.required and self.step is None:
                trainer.logger.info(f"no checkpoint in {self.folder}: beginning anew")
                return
            trainer.load_state(manager, self._model, self.step)

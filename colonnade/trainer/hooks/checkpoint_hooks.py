"""Hooks that save checkpoints, resume from them, and keep an average of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from colonnade.checkpoint.manager import CheckpointManager
from colonnade.comm.messages import gather_from_all
from colonnade.errors import CheckpointError, ConfigError
from colonnade.parallel.placement import local_part
from colonnade.paths import local_path
from colonnade.registry import HOOKS
from colonnade.trainer.hooks.hook import BaseHook, checked_interval

if TYPE_CHECKING:
    from colonnade.trainer.trainer import Trainer


@HOOKS.register_module
class SaveCheckpointHook(BaseHook):
    """Saves everything for a bit-exact resume, periodically and at the end of the run (also after a requested stop).

    The priority is late, so that other hooks have processed the step before their states are saved.

    Args:
        interval: epochs (or steps) between two checkpoints.
        folder: the folder of the checkpoints.
        model: default: the model of the engine.
        by_epoch: count epochs; False: count optimizer steps.
        priority: hooks with a lower priority run first.
        keep: as for `CheckpointManager`.
        background: as for `CheckpointManager`.
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
        self.interval, self.by_epoch = checked_interval(interval), by_epoch
        self.folder = local_path(folder, f"{type(self).__name__}'s folder", CheckpointError)
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
        if self._manager is not None:  # after an error on this rank: no collectives
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
    """Resumes from the newest intact checkpoint of a folder, or from that of `step`, before all other hooks.

    If the folder has no checkpoint, the run starts from the beginning, unless `required`. An interrupted epoch
    continues exactly as without the interruption; on another layout, with the same remaining samples and new random
    streams.
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
        self.step, self.required = step, required
        self.folder = local_path(folder, f"{type(self).__name__}'s folder", CheckpointError)
        self._model = model

    def before_train(self, trainer: Trainer) -> None:
        context = trainer.context
        with CheckpointManager(self.folder, context, read_only=True) as manager:
            seen = manager.steps() if context.get_global_rank() == 0 and self.folder.is_dir() else []
            is_there, *_ = gather_from_all(bool(seen), context)
            if not is_there and not self.required and self.step is None:
                trainer.logger.info(f"no checkpoint in {self.folder}: starting from the beginning")
                return
            trainer.load_state(manager, self._model, self.step)


# --- An average of the weights: used in evaluations, and saved with the checkpoints ---


FOLDER = "ema"


@HOOKS.register_module
class EMAHook(BaseHook):
    """Keeps an exponential moving average of the weights: average = decay x average + (1 - decay) x weights.

    Each rank averages its own shard of every parameter, so the hook works under any layout. The average has at least fp32
    precision; for half-precision weights it averages the rounded values. Buffers are not averaged. `with hook.swapped():`
    puts the average in place of the weights.

    A SaveCheckpointHook saves the average too, as checkpoints of the same steps in its subfolder `ema`, which every layout can
    load and `colonnade ckpt export` can convert into one file.

    Args:
        decay: weight of the old average, from 0 to below 1.
        interval: steps between two updates.
        warm_up: limit the decay to (1 + n) / (10 + n) after n updates, so that early weights are soon forgotten.
        evaluate: use the average in evaluations, inside and outside `fit`.
        priority: hooks with a lower priority run first.
    """

    def __init__(
        self, decay: float = 0.999, interval: int = 1, warm_up: bool = True, evaluate: bool = True, priority: int = 50
    ) -> None:
        super().__init__(priority)
        if not 0 <= decay < 1:
            raise ConfigError(
                f"EMAHook got decay={decay!r}; it must be at least 0 and less than 1, such as 0.999", code="C092"
            )
        self.decay, self.interval, self.warm_up, self.evaluate = decay, checked_interval(interval), warm_up, evaluate
        self.updates = 0
        self._shards: list[Tensor] = []
        self._average: list[Tensor] = []
        self._aside: list[Tensor] | None = None
        """The weights, while the average is in their place."""
        self._trainer: Trainer | None = None
        self._manager: CheckpointManager | None = None

    # -- the average --------------------------------------------------------------------------------------

    def before_train(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._parameters = [parameter for parameter in trainer.engine.model.parameters() if parameter.requires_grad]
        self._shards = [local_part(parameter) for parameter in self._parameters]
        if not self._average:
            self._average = [
                shard.to(torch.promote_types(shard.dtype, torch.float32), copy=True) for shard in self._shards
            ]
        saving = next((hook for hook in trainer.hooks if isinstance(hook, SaveCheckpointHook)), None)
        if saving is not None:
            folder, keep = saving.folder / FOLDER, saving.keep
            self._manager = CheckpointManager(folder, trainer.context, keep, saving.background)

    @torch.no_grad()
    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Tensor | None) -> None:
        if not trainer.step_done or trainer.cur_step % self.interval:
            return
        trainer.engine.wait_for_weights()
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates)) if self.warm_up else self.decay
        weights = [shard.to(mean.dtype) for shard, mean in zip(self._shards, self._average, strict=True)]
        torch._foreach_lerp_(self._average, weights, 1 - decay)
        self.updates += 1

    def before_test(self, trainer: Trainer) -> None:
        if self.evaluate and self.updates:
            self._swap_in()

    def after_test(self, trainer: Trainer) -> None:
        self._swap_out()

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside the block, replace the weights by the average. All ranks must enter the block together."""
        self._swap_in()
        try:
            yield
        finally:
            self._swap_out()

    @torch.no_grad()
    def _swap_in(self) -> None:
        if self._aside is None and self._trainer is not None:
            self._trainer.engine.wait_for_weights()
            self._aside = [shard.clone() for shard in self._shards]
            _copy(self._average, self._shards)

    @torch.no_grad()
    def _swap_out(self) -> None:
        if self._aside is not None:
            _copy(self._aside, self._shards)
            self._aside = None

    # -- with checkpoints ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        if self._manager is not None and trainer is not None:
            with self._unrounded():
                self._manager.save(trainer.cur_step, trainer.engine.model)
        return {"updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        assert trainer is not None
        loading = next((hook for hook in trainer.hooks if isinstance(hook, LoadCheckpointHook)), None)
        if loading is None:
            return
        folder = loading.folder / FOLDER
        with CheckpointManager(folder, trainer.context, read_only=True) as manager, self._unrounded():
            manager.load(trainer.engine.model, step=trainer.cur_step)
            _copy([local_part(parameter) for parameter in self._parameters], self._average)
        self.updates = state["updates"]

    @contextmanager
    def _unrounded(self) -> Iterator[None]:
        """Put the average in place of the weights with its own dtype, since half-precision weights would round it."""
        narrow = [
            (parameter, mean)
            for parameter, shard, mean in zip(self._parameters, self._shards, self._average, strict=True)
            if shard.dtype != mean.dtype and type(parameter.data) is Tensor
        ]
        with self.swapped(), torch.no_grad():
            rounded = [parameter.data for parameter, _ in narrow]
            try:
                for parameter, mean in narrow:
                    parameter.data = mean
                yield
            finally:
                for (parameter, _), data in zip(narrow, rounded, strict=True):
                    parameter.data = data

    def after_train(self, trainer: Trainer) -> None:
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    def close(self) -> None:
        self._swap_out()
        if self._manager is not None:  # after an error on this rank: no collectives
            self._manager.__exit__(CheckpointError)
            self._manager = None


def _copy(sources: list[Tensor], targets: list[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)

"""Hooks that save checkpoints of a run and go on from them."""

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
from colonnade.parallel.dtensor import local_part
from colonnade.paths import local_path
from colonnade.registry import HOOKS
from colonnade.trainer.hooks.hook import BaseHook, checked_interval

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
            is_there, *_ = gather_from_all(bool(seen), context)
            if not is_there and not self.required and self.step is None:
                trainer.logger.info(f"no checkpoint in {self.folder}: beginning anew")
                return
            trainer.load_state(manager, self._model, self.step)


# --------------------------------------------------------------------------------------------------
# An average of the weights over the steps: kept beside them, used in evaluations, saved with them.
# --------------------------------------------------------------------------------------------------


FOLDER = "ema"


@HOOKS.register_module
class EMAHook(BaseHook):
    """Keeps an exponential moving average of the weights: average = decay x average + (1 - decay) x weights.

    Each rank averages its own part of every parameter, so it is right under any layout. It is kept in fp32 at least; of
    half-precision weights it is the average of what they round to. With `warm_up` the decay is at most (1 + n) / (10 + n) after
    n updates, so that the first weights are soon forgotten. Evaluations inside and outside `fit` see the average unless
    `evaluate` is False; `with hook.swapped():` shows it to anything else. Buffers are not averaged.

    A SaveCheckpointHook saves it too: as checkpoints of the same steps in the folder `ema` of its own, which every layout reads and
    `colonnade ckpt export` makes one file of.
    """

    def __init__(
        self, decay: float = 0.999, interval: int = 1, warm_up: bool = True, evaluate: bool = True, priority: int = 50
    ) -> None:
        super().__init__(priority)
        if not 0 <= decay < 1:
            raise ConfigError(f"EMAHook: decay is from 0 to below 1, such as 0.999, not {decay!r}", code="C092")
        self.decay, self.interval, self.warm_up, self.evaluate = decay, checked_interval(interval), warm_up, evaluate
        self.updates = 0
        self._parts: list[Tensor] = []
        self._average: list[Tensor] = []
        self._aside: list[Tensor] | None = None
        """The weights themselves, while the average is in their place."""
        self._trainer: Trainer | None = None
        self._manager: CheckpointManager | None = None

    # -- the average --------------------------------------------------------------------------------------

    def before_train(self, trainer: Trainer) -> None:
        self._trainer = trainer
        parameters = [each for each in trainer.engine.model.parameters() if each.requires_grad]
        self._parameters = parameters
        self._parts = [local_part(each) for each in parameters]
        if not self._average:
            self._average = [part.to(torch.promote_types(part.dtype, torch.float32), copy=True) for part in self._parts]
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
        weights = [part.to(mean.dtype) for part, mean in zip(self._parts, self._average, strict=True)]
        torch._foreach_lerp_(self._average, weights, 1 - decay)
        self.updates += 1

    def before_test(self, trainer: Trainer) -> None:
        if self.evaluate and self.updates:
            self._put_in()

    def after_test(self, trainer: Trainer) -> None:
        self._put_back()

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The average in the place of the weights; every rank does it together."""
        self._put_in()
        try:
            yield
        finally:
            self._put_back()

    @torch.no_grad()
    def _put_in(self) -> None:
        if self._aside is None and self._trainer is not None:
            self._trainer.engine.wait_for_weights()
            self._aside = [part.clone() for part in self._parts]
            _copy(self._average, self._parts)

    @torch.no_grad()
    def _put_back(self) -> None:
        if self._aside is not None:
            _copy(self._aside, self._parts)
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
            _copy([local_part(each) for each in self._parameters], self._average)
        self.updates = state["updates"]

    @contextmanager
    def _unrounded(self) -> Iterator[None]:
        """The average in the place of the weights, in its own dtype: half-precision weights would round it."""
        narrow = [
            (parameter, mean)
            for parameter, part, mean in zip(self._parameters, self._parts, self._average, strict=True)
            if part.dtype != mean.dtype and type(parameter.data) is Tensor
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
        self._put_back()
        if self._manager is not None:  # after an error of this rank: nothing collective
            self._manager.__exit__(CheckpointError)
            self._manager = None


def _copy(sources: list[Tensor], targets: list[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)

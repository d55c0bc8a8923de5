"""Trainer: an engine, a loader and hooks as one call. It trains, evaluates and predicts, on any layout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any, Literal

from torch import Tensor, nn

from colonnade.checkpoint.manager import CheckpointManager
from colonnade.checkpoint.random_state import random_state
from colonnade.checkpoint.storage.writer import tell_launcher
from colonnade.comm.messages import agreed_errors
from colonnade.comm.phases import PhaseClock
from colonnade.constants import STOPPED_IN_ORDER
from colonnade.engine.engine import Engine
from colonnade.engine.schedule.base import BaseSchedule
from colonnade.errors import CheckpointError, ConfigError, listed
from colonnade.logging import DistributedLogger, get_dist_logger
from colonnade.trainer.data import Place
from colonnade.trainer.evaluation import predict, run_test
from colonnade.trainer.exchange import Exchange, alone
from colonnade.trainer.hooks.base import BaseHook
from colonnade.trainer.hooks.hook_list import HookLike, HookList
from colonnade.trainer.hooks.progress import ProgressHook
from colonnade.trainer.loop import Loop
from colonnade.trainer.records import RecordBook, Weight
from colonnade.utils.timer import MultiTimer


class Trainer:
    """Trains the model of an engine.

    `states` is a dict that hooks share; metrics are in `states["metrics"]["train"]` and `["test"]`. A step is an
    optimizer step, of `gradient_accumulation` batches; `cur_step` counts those that have been made, `cur_epoch` the
    epochs that are over. All methods are called by every rank together.
    """

    def __init__(
        self,
        engine: Engine,
        timer: MultiTimer | None = None,
        logger: DistributedLogger | None = None,
        schedule: BaseSchedule | None = None,
    ) -> None:
        if not isinstance(engine, Engine):
            raise ConfigError(
                f"a Trainer takes the engine that initialize() returns first, not a {type(engine).__name__}",
                code="C092",
            )
        self.engine = engine
        self.context = engine.context
        self.timer = timer
        self.logger = logger or get_dist_logger()
        if schedule is not None:
            engine.schedule = schedule
        self.states: dict[str, Any] = {"metrics": {"train": {}, "test": {}}}
        self.max_epochs: int | None = None
        self.max_steps: int | None = None
        self.steps_per_epoch: int | None = None
        self.step_done = False
        """Whether the last batch ended an optimizer step."""
        self.epoch_done = False
        """Whether all batches of the epoch have been learnt from."""
        self.stopping = False
        """Whether all ranks have agreed to stop after the step that is being made."""
        self.stop_reason = ""
        self.failed = False
        self.batch_weight: Weight = (None, 0.0)
        """The last batch's (sum of the loss, weight), where this rank has its loss."""
        self.returns_output = True
        """Whether hooks get outputs and labels."""
        self._cur_epoch = self._cur_step = 0
        self._place = Place()
        self._hooks = HookList(self, [])
        self._exchange = Exchange(self.context)
        self.clock = PhaseClock(self.context.device)
        """Where the time of the step that is being made goes."""
        self._book = RecordBook(self.clock)
        self._loop: Loop | None = None
        self._wants_stop = ""
        self._wants_exit = False

    # -- what a user calls --------------------------------------------------------------------------------

    def fit(
        self,
        train_dataloader: Iterable[Any],
        epochs: int | None = None,
        max_steps: int | None = None,
        test_dataloader: Iterable[Any] | None = None,
        test_interval: int = 1,
        hooks: Iterable[HookLike] | None = None,
        display_progress: bool = False,
        return_output_label: bool = True,
    ) -> None:
        """Train until `epochs` epochs or `max_steps` steps have been made, counted from the start of the run.

        Evaluates on `test_dataloader` after every `test_interval` epochs. Hooks are objects, or dicts as in a config.
        Ranks may have different numbers of batches, where their forward passes do not need each other. An error of a hook
        or a loader on one rank is raised on all.
        After a stop by a signal (`StopOnSignal`) it ends with SystemExit(75), when everything has been cleaned up.
        """
        self._set_limits(epochs, max_steps, test_interval)
        self.returns_output = return_output_label
        self._attach([*(hooks or ()), *([ProgressHook()] if display_progress else [])])
        loop = Loop(self, train_dataloader, test_dataloader, test_interval)
        self._run(loop)
        if self._wants_exit:
            raise SystemExit(STOPPED_IN_ORDER)

    def evaluate(
        self,
        dataloader: Iterable[Any],
        hooks: Iterable[HookLike] | None = None,
        return_output_label: bool = True,
    ) -> dict[str, float]:
        """Run over test data; returns the metrics over all ranks' samples. `hooks` are those of `fit` unless given."""
        if hooks is not None or not self._hooks.hooks:
            self._attach(hooks if hooks is not None else self._default_hooks())
        self.returns_output = return_output_label
        run_test(self, dataloader, self.agree)
        return self.metric_values("test")

    def predict(self, dataloader: Iterable[Any]) -> Any:
        """The outputs for all samples of a loader, joined in the order of the dataset, on the host of every rank.

        With a sampler, samples are in the order of their indices and none is there twice. Loaders without indices
        are joined rank after rank.
        """
        return predict(self, dataloader)

    def request_stop(self, reason: str, leave: bool = False) -> None:
        """Stop all ranks after the step that comes next; with `leave` the process exits with code 75."""
        self._wants_stop = self._wants_stop or reason
        self._wants_exit = self._wants_exit or leave

    def log(self, values: Mapping[str, Tensor | float]) -> None:
        """Add numbers to the record of the step that was just made; tensors are read one step later."""
        self._book.add(values)

    def metric_values(self, kind: str) -> dict[str, float]:
        """The metrics of "train" or "test" by name, as they were last gathered."""
        return {name: metric.get_accumulated_value() for name, metric in self.states["metrics"][kind].items()}

    def settle(self) -> None:
        """Finish the record of every step so far now, rather than one step later. Collective."""
        if self._loop is not None:
            self._loop.settle()

    def state_dict(self) -> dict[str, Any]:
        """Everything beside model and optimizer, for `CheckpointManager.save(extra=)`. Collective: hooks are asked."""
        loop = self._loop
        assert loop is not None
        self.settle()
        hooks = self._hooks.state_dict()
        self.agree()
        return {
            "trainer": {
                "epoch": self.cur_epoch,
                "step": self.cur_step,
                "epoch_done": self.epoch_done,
                "data": asdict(self._place),
            },
            "hooks": hooks,
            "data": loop.feed.own_state(),
            **self.engine.extra_state(),
        }

    def load_state(self, manager: CheckpointManager, model: nn.Module | None = None, step: int | None = None) -> None:
        """Load a checkpoint, the newest or that of `step`, and go on where it was saved. Collective; all or nothing.

        Hooks get their states when the epoch has begun.
        """
        loop, engine = self._loop, self.engine
        assert loop is not None
        info = manager.load(model or engine.model, engine.optimizer, step=step, rest=_Rest(engine))
        if self.context.get_global_rank() == 0:
            tell_launcher(info.step, info.folder, by_trainer=True)
        extra, place = info.extra, info.extra["trainer"]
        self.cur_epoch = place["epoch"]
        self._cur_step = place["step"]
        own = extra.get("data") if info.same_layout else None
        self._place = loop.feed.load_state_dict(Place(**place["data"]), own)
        self.epoch_done = place["epoch_done"]
        loop.resumed = (extra["hooks"], random_state(self.context))

    # -- where it is --------------------------------------------------------------------------------------

    @property
    def cur_epoch(self) -> int:
        """The number of the epoch, from 0; may be set before `fit`, which then begins there."""
        return self._cur_epoch

    @cur_epoch.setter
    def cur_epoch(self, epoch: int) -> None:
        self._cur_epoch, self._place, self.epoch_done = epoch, Place(), False

    @property
    def cur_step(self) -> int:
        """How many optimizer steps have been made."""
        return self._cur_step

    @property
    def is_fitting(self) -> bool:
        """Whether `fit` is running: an evaluation may be one of its own, or one that was asked for."""
        return self._loop is not None

    @property
    def hooks(self) -> list[BaseHook]:
        """The hooks in the order in which they are called."""
        return self._hooks.hooks

    @property
    def total_steps(self) -> int | None:
        """How many steps the run will have at most, if that is known."""
        by_epochs = None
        if self.max_epochs is not None and self.steps_per_epoch is not None:
            by_epochs = self.max_epochs * self.steps_per_epoch
        known = [limit for limit in (self.max_steps, by_epochs) if limit is not None]
        return min(known) if known else None

    def time(self, action: Literal["start", "stop"], name: str) -> None:
        """Start or stop a timer, if the trainer has timers."""
        if self.timer is not None:
            (self.timer.start if action == "start" else self.timer.stop)(name)

    def agree(self) -> None:
        """Raise on every rank what any rank holds; returns if none does. Collective."""
        with self._together():
            if self._hooks.held is not None:
                raise self._hooks.held

    # -- inside -------------------------------------------------------------------------------------------

    def _set_limits(self, epochs: int | None, max_steps: int | None, test_interval: int) -> None:
        if epochs is None and max_steps is None:
            raise ConfigError("fit needs epochs= or max_steps=, or it would never end", code="C092")
        for name, value in (("epochs", epochs), ("max_steps", max_steps), ("test_interval", test_interval)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} is a whole number from 1 on, not {value!r}", code="C092")
        self.max_epochs, self.max_steps = epochs, max_steps

    def _attach(self, hooks: Iterable[HookLike]) -> None:
        """Take these hooks; what is wrong with one is said on every rank, before anything has begun."""
        self._hooks.close()
        self.states["metrics"] = {"train": {}, "test": {}}
        with self._together():
            self._hooks = HookList(self, hooks)
        self._hooks.call("after_hook_is_attached")
        try:
            self.agree()
        except BaseException:
            self._hooks.close()
            raise

    def _together(self) -> AbstractContextManager[Any]:
        return nullcontext() if alone(self.context) else agreed_errors(self.context.device)

    def _default_hooks(self) -> list[HookLike]:
        return [{"type": "LossHook"}] if self.engine.gives_loss else []

    def _run(self, loop: Loop) -> None:
        self.failed = self.stopping = self._wants_exit = False
        self._wants_stop = self.stop_reason = ""
        self._loop = loop
        self.context.waits.clock = self.clock
        try:
            loop.run()
        finally:
            self.context.waits.clock = None
            self._hooks.close()
            self._loop = None


class _Rest:
    """What a run takes of a checkpoint beside weights and optimizer; it refuses one that is not of a trainer's run."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, Any]:
        return {"trainer": {"data": {}}, "hooks": {}, **self._engine.extra_state()}

    def load_state_dict(self, extra: Mapping[str, Any]) -> None:
        missing = [name for name in ("trainer", "hooks") if name not in extra]
        if missing:
            raise CheckpointError(
                f"it has no {listed(missing)}: it was not saved by a SaveCheckpointHook. Load it with a "
                f"CheckpointManager before fit."
            )
        Place(**extra["trainer"]["data"])
        self._engine.load_extra_state(extra)

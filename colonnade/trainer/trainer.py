"""Trainer: an engine, a loader and hooks as one call. It trains, evaluates and predicts, on any layout."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import Tensor, nn

from colonnade.checkpoint.manager import CheckpointManager
from colonnade.checkpoint.save import tell_launcher
from colonnade.checkpoint.values import is_stateful
from colonnade.comm.messages import agree, is_alone
from colonnade.comm.waits import PhaseClock
from colonnade.constants import STOPPED_IN_ORDER
from colonnade.context.random_state import random_state, set_random_state
from colonnade.engine.engine import Engine
from colonnade.engine.schedule.base import BaseSchedule
from colonnade.errors import CheckpointError, ColonnadeError, ConfigError, ScheduleError, TrainerError, listed
from colonnade.logging import DistributedLogger, get_dist_logger
from colonnade.trainer.data import NO_BATCH, EpochPosition, Feed, Lengths, last_batch, moves_together, read_lengths
from colonnade.trainer.evaluation import predict, run_test
from colonnade.trainer.hooks.hook import BaseHook, HookLike, HookList
from colonnade.trainer.hooks.progress import ProgressHook
from colonnade.trainer.records import Draft, Exchange, RecordBook, Weight, speaks, weigh
from colonnade.utils.timer import MultiTimer

# --------------------------------------------------------------------------------------------------
# The loop of `fit`: epochs, batches, steps, and what the ranks tell each other between two steps.
# --------------------------------------------------------------------------------------------------


class _Over(Exception):
    """The loop ends after this step: raised inside `Engine.batches` by ranks that have no batch of their own."""


ASKS_AHEAD = {"cuda"}
"""Devices that the host must not keep waiting between two steps; on others a gradient's sum is a wait in any case."""

LAG = {"cuda": 1}
"""Devices that are still busy with the last step when the host asks: so many steps later yet their numbers are read."""


@dataclass
class _Question:
    """What this rank has told the others before a step, and how to get the sums of what all have told."""

    has_batch: bool
    draft: Draft | None
    sums: Callable[[], list[float]]


class Loop:
    """One `fit`. Before a step the ranks add up a few numbers on the host: who holds an error, who has a batch, who
    wants to stop, and the loss of the step before. So all of them go on, or all stop, or all raise.

    On a device (`ASKS_AHEAD`) nobody waits for the sums: the batch of the next step is fetched before a step is made,
    the question is asked then, and answered by the end of the step. The error of a hook is raised one step later then.
    Loaders with a state of their own, which say where they are when asked, are not read ahead.
    """

    _even: bool
    """Whether all ranks have a batch for every pass of this epoch, or none has."""
    _ahead: bool
    """Whether the question before a step is asked before the step before it."""

    def __init__(
        self, trainer: Trainer, loader: Iterable[Any], test_loader: Iterable[Any] | None, test_interval: int
    ) -> None:
        self._trainer = trainer
        self._engine = trainer.engine
        self._hooks = trainer._hooks
        self._context = trainer.context
        self._test_loader, self._test_interval = test_loader, test_interval
        self.feed = Feed(loader, trainer.context)
        self._lengths = lengths = read_lengths(loader, self._context)
        if test_loader is not None:
            read_lengths(test_loader, self._context)  # what is wrong with it is said before the first step
        trainer.steps_per_epoch = _steps(lengths, self._engine.accumulation)
        with agree(trainer.context):
            self._check_last_batch(loader)
        self._together = moves_together(lengths, self._context)
        self._counts_samples = speaks(self._context, pipeline=True)
        self._lag = LAG.get(self._context.device.type, 0)
        waits = self._context.device.type in ASKS_AHEAD and not is_alone(self._context)
        self._may_ask_ahead = waits and not is_stateful(loader)
        self._waiting: deque[Draft] = deque()
        self._question: _Question | None = None
        self._told: tuple[_Question, list[float]] | None = None
        self.resumed: Any = None
        """What a LoadCheckpointHook has found: (states of the hooks, random streams of the step)."""

    def run(self) -> None:
        """Train; errors that all ranks know of end it in order, others at once."""
        self._engine.train()
        try:
            self._train()
        except _Agreed as agreed:
            self._trainer.failed = True
            self._hooks.call("after_train")
            raise agreed.error from agreed.error.__cause__
        self._hooks.call("after_train")
        self._trainer.agree()

    def settle(self) -> None:
        """Finish the records of all steps. Collective."""
        self._hear()
        self._put_in_line()
        while self._waiting:
            draft = self._waiting.popleft()
            self._finish(draft, self._trainer._exchange.sum(draft.sums()))

    def _check_last_batch(self, loader: Any) -> None:
        """Refuse now, and not at the end of the first epoch, a last batch of fewer rows than the pipeline has micro-batches.

        Where a batch has as many rows as samples, that is, and the run does not end before it.
        """
        schedule, trainer = self._engine.schedule, self._trainer
        pieces, sizes = getattr(schedule, "num_microbatches", None), last_batch(loader)
        makes_rows = schedule.data_process_func or getattr(schedule, "_stage_data_func", None)
        if not isinstance(pieces, int) or makes_rows or sizes is None or not 0 < sizes.last < pieces:
            return
        before = sizes.whole // self._engine.accumulation
        if trainer.max_steps is not None and trainer.max_steps <= before:
            return
        raise ScheduleError(
            f"the last batch of an epoch will have {sizes.last} rows ({sizes.samples} samples on this rank in batches of "
            f"{sizes.size}), and cannot be cut into {pieces} micro-batches. Set drop_last=True on the data loader, use another "
            f"size of batches, or set num_microbatches to {sizes.last} or less.",
            code="C052",
        )

    # -- epochs -------------------------------------------------------------------------------------------

    def _train(self) -> None:
        trainer = self._trainer
        self._call("before_train")
        if self.resumed is not None and (trainer._place.batches == 0 or trainer.epoch_done):
            set_random_state(self._load_hook_states(), self._context)
        while not self._is_over():
            if not trainer.epoch_done:
                self._train_epoch()
            if trainer.stopping and (trainer._wants_exit or not trainer.epoch_done):
                break
            if self._test_loader is not None and (trainer.cur_epoch + 1) % self._test_interval == 0:
                run_test(trainer, self._test_loader, self._agree)
                self._agree_to_stop()
            if not trainer.epoch_done:
                break
            trainer.cur_epoch += 1
        if trainer.stopping:
            trainer.logger.info(f"stopped after step {trainer.cur_step}: {trainer.stop_reason}")

    def _is_over(self) -> bool:
        trainer = self._trainer
        too_far = trainer.max_epochs is not None and trainer.cur_epoch >= trainer.max_epochs
        return trainer.stopping or too_far or self._enough_steps()

    def _enough_steps(self) -> bool:
        return self._trainer.max_steps is not None and self._trainer.cur_step >= self._trainer.max_steps

    def _train_epoch(self) -> None:
        trainer = self._trainer
        trainer.time("start", "Train-epoch")
        self._call("before_train_epoch")
        then = self._load_hook_states() if self.resumed is not None else None
        trainer._book.restart()
        ended = self._train_batches(then)
        self._agree()
        trainer.epoch_done = ended
        if ended and trainer._place.batches == 0:
            raise ConfigError(
                f"epoch {trainer.cur_epoch} had no batches on any rank; there is nothing to train on", code="C090"
            )
        self.settle()
        trainer.time("stop", "Train-epoch")
        if not trainer.stopping or ended:
            self._call("after_train_epoch")
            self._agree_to_stop()

    def _train_batches(self, then: Any) -> bool:
        """Learn from every batch of the epoch; whether the loop came to its end."""
        # Ranks that run out go on without batches, where the engine can do that; else all must have equally many.
        place = self._trainer._place
        whole = _divides(self._lengths, self.feed.batches_behind(place), self._engine.accumulation)
        self._even = self._together or (whole and not self.feed.inside_batch(place))
        self._ahead = self._may_ask_ahead and self._even
        fetched = self._fetched(then)
        batches = self._even_batches(fetched) if self._even else self._engine.batches(fetched, self._no_batch)
        # Closed at once: what the engine keeps while ranks may run out must not outlive the loop.
        with closing(fetched), closing(batches):  # type: ignore[type-var]
            try:
                for batch in batches:
                    self._pass(batch)
            except _Over:
                return False
        return True

    # -- batches ------------------------------------------------------------------------------------------

    def _pass(self, batch: Any) -> None:
        """Learn from one batch."""
        trainer, engine = self._trainer, self._engine
        self._hooks.call("before_train_iter")
        trainer.time("start", "Train-step")
        engine.zero_grad()
        output, label, loss = engine.execute_schedule(iter((batch,)), return_output_label=trainer.returns_output)
        trainer.batch_weight = weigh(loss, engine.loss_count, engine.schedule.batch_size)
        stepped = engine.step()
        trainer.time("stop", "Train-step")
        trainer._book.add_pass(*trainer.batch_weight, engine.schedule.batch_size if self._counts_samples else 0)
        self._after_pass(stepped, output, label, loss)

    def _no_batch(self) -> None:
        """A step of the others was made, in which this rank took part without a batch."""
        self._trainer.batch_weight = (None, 0.0)
        self._after_pass(True, None, None, None)

    def _after_pass(self, stepped: bool, output: Any, label: Any, loss: Tensor | None) -> None:
        trainer = self._trainer
        trainer.step_done = stepped
        if stepped:
            trainer._cur_step += 1
            trainer._place = self.feed.after(trainer._place, self._engine.accumulation)
            trainer._book.end_step(trainer.cur_step, trainer.cur_epoch, self._engine)
        self._hooks.call("after_train_iter", output, label, loss)
        if stepped:
            self._between_steps()

    def _between_steps(self) -> None:
        if self._trainer.stopping or self._enough_steps():
            self._agree()
            raise _Over
        if not self._even:
            self._ask(has_batch=True)
            self._answer()
        self._put_in_line()

    def _put_in_line(self) -> None:
        draft = self._trainer._book.draft()
        if draft is not None:
            self._waiting.append(draft)

    def _even_batches(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Batches that all ranks have; raises on all of them when one has run out before the others."""
        batch = next(iterator, NO_BATCH)
        self._ask(batch is not NO_BATCH)
        while self._answer():
            if self._ahead:
                self.feed.look_ahead()
                following = next(iterator, NO_BATCH)
                self._ask(following is not NO_BATCH)
                yield batch
            else:
                yield batch
                following = next(iterator, NO_BATCH)
                self._ask(following is not NO_BATCH)
            batch = following

    def _fetched(self, then: Any) -> Iterator[Any]:
        """The batches of the loader; its error is held, and looks like its end."""
        trainer, clock = self._trainer, self._trainer.clock
        try:
            batches = self.feed.open(trainer.cur_epoch, trainer._place, then)
            while True:
                before = clock.enter("data")
                batch = next(batches, NO_BATCH)
                clock.enter(before)
                if batch is NO_BATCH:
                    return
                yield batch
        except Exception as error:
            told = TrainerError(
                f"the training data loader failed in epoch {trainer.cur_epoch}, after step {trainer.cur_step}: "
                f"{type(error).__name__}: {error}",
                code="C090",
            )
            told.__cause__ = error
            self._hooks.hold(told)

    # -- between steps ------------------------------------------------------------------------------------

    def _ask(self, has_batch: bool) -> None:
        """Tell the others what matters before the next step. Collective; waits for nobody."""
        trainer = self._trainer
        draft = self._waiting.popleft() if len(self._waiting) > self._lag else None
        mine = (self._hooks.held is not None, has_batch, not has_batch, bool(trainer._wants_stop), trainer._wants_exit)
        sums = draft.sums() if draft is not None else [0.0, 0.0, 0.0]
        self._question = _Question(has_batch, draft, trainer._exchange.start([*map(float, mine), *sums]))

    def _hear(self) -> None:
        """Wait for what the others have told; the record that came with it is finished."""
        if self._question is not None:
            question, self._question = self._question, None
            *flags, loss, weight, samples = question.sums()
            self._told = question, flags
            if question.draft is not None:
                self._finish(question.draft, [loss, weight, samples])

    def _answer(self) -> bool:
        """Whether there are batches for the next step; raises on all ranks what any of them holds."""
        self._hear()
        assert self._told is not None
        question, (errors, have, have_not, stops, exits) = self._told
        if errors:
            self._agree()
        self._note_stop(stops, exits)
        if have and have_not:
            self._raise_uneven(question.has_batch)
        if have and self._ahead and self._trainer.stopping and self._trainer.step_done:
            raise _Over  # the step in which it was asked for has been made
        return bool(have)

    def _agree_to_stop(self) -> None:
        """The same at the end of an epoch, where there is no next batch to ask for. Collective."""
        trainer = self._trainer
        stops, exits = trainer._exchange.sum([float(bool(trainer._wants_stop)), float(trainer._wants_exit)])
        self._note_stop(stops, exits)

    def _note_stop(self, stops: float, exits: float) -> None:
        trainer = self._trainer
        if stops and not trainer.stopping:
            trainer.stopping = True
            trainer.stop_reason = trainer._wants_stop or "asked for by another rank"
        trainer._wants_exit = trainer._wants_exit or bool(exits)

    def _raise_uneven(self, has_batch: bool) -> None:
        error = TrainerError(
            f"this rank ran out of batches in epoch {self._trainer.cur_epoch} after step {self._trainer.cur_step} while "
            f"others had more, and this layout needs all of them in every pass. Give all ranks equally many batches.",
            code="C090",
        )
        if not has_batch:
            self._hooks.hold(error)
        self._agree()

    def _finish(self, draft: Draft, sums: list[float]) -> None:
        self._hooks.call("on_record", draft.record(sums))

    def _load_hook_states(self) -> Any:
        """Give the hooks their states of the checkpoint; returns the random streams it had."""
        states, then = self.resumed
        self.resumed = None
        self._hooks.load_state_dict(states)
        self._agree()
        return then

    def _call(self, point: str) -> None:
        self._hooks.call(point)
        self._agree()

    def _agree(self) -> None:
        try:
            self._trainer.agree()
        except ColonnadeError as error:
            raise _Agreed(error) from None


class _Agreed(Exception):
    """Carries an error that every rank has raised at the same point, so that they may still talk to each other."""

    def __init__(self, error: ColonnadeError) -> None:
        super().__init__(str(error))
        self.error = error


def _steps(lengths: Lengths, accumulation: int) -> int | None:
    return -(-lengths.longest // accumulation) if lengths.longest is not None else None


def _divides(lengths: Lengths, behind: int, accumulation: int) -> bool:
    """Whether every rank has as many batches after the first `behind`, and they make whole steps."""
    return lengths.equal and lengths.longest is not None and (lengths.longest - behind) % accumulation == 0


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
        self._place = EpochPosition()
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
        self._place = loop.feed.load_state_dict(EpochPosition(**place["data"]), own)
        self.epoch_done = place["epoch_done"]
        loop.resumed = (extra["hooks"], random_state(self.context))

    # -- where it is --------------------------------------------------------------------------------------

    @property
    def cur_epoch(self) -> int:
        """The number of the epoch, from 0; may be set before `fit`, which then begins there."""
        return self._cur_epoch

    @cur_epoch.setter
    def cur_epoch(self, epoch: int) -> None:
        self._cur_epoch, self._place, self.epoch_done = epoch, EpochPosition(), False

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
        with agree(self.context):
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
        with agree(self.context):
            self._hooks = HookList(self, hooks)
        self._hooks.call("after_hook_is_attached")
        try:
            self.agree()
        except BaseException:
            self._hooks.close()
            raise

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
        EpochPosition(**extra["trainer"]["data"])
        self._engine.load_extra_state(extra)

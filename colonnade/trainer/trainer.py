"""Trainer: an engine, a loader and hooks as one call. It trains, evaluates and predicts, on any layout.

`fit` prepares a run and ends it, whatever happens. `_train` tells the run: its epochs and evaluations. `_train_epoch`
tells an epoch, `_train_step` a step. Between two steps all ranks must take the same branch: they add up a few flags on the host
(`_start_sums`, `_finish_sums`: who holds an error, who has a batch, who wants to stop), with the loss of an earlier step. So
all of them go on, or all stop, or all raise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from colonnade.checkpoint.manager import CheckpointManager
from colonnade.checkpoint.save import tell_launcher
from colonnade.checkpoint.values import is_stateful
from colonnade.comm.messages import agree, is_alone
from colonnade.comm.waits import PhaseClock
from colonnade.constants import STOPPED_IN_ORDER
from colonnade.context.random import random_state, set_random_state
from colonnade.engine.engine import Engine
from colonnade.engine.schedule.base import BaseSchedule
from colonnade.errors import CheckpointError, ColonnadeError, ConfigError, ScheduleError, TrainerError, listed
from colonnade.logging import DistributedLogger, get_dist_logger
from colonnade.trainer.data import NO_BATCH, EpochPosition, Feed, Lengths, last_batch, moves_together, read_lengths
from colonnade.trainer.evaluation import predict, run_test
from colonnade.trainer.hooks.hook import BaseHook, HookLike, HookList
from colonnade.trainer.hooks.progress import ProgressHook
from colonnade.trainer.records import (
    Exchange,
    RecordBook,
    StepSums,
    Weight,
    is_first_with_data,
    weigh,
)

ASKS_AHEAD = {"cuda"}
"""Devices that the host must not keep waiting between two steps; on others a gradient's sum is a wait in any case."""

LAG = {"cuda": 1}
"""Devices that are still busy with the last step when the sums start: so many steps later yet their numbers are read."""


@dataclass
class FitState:
    """The data of one `fit`, and what its ranks tell each other between two steps."""

    hooks: HookList
    """Those that `fit` was given, also after a hook has called `evaluate` with others."""
    feed: Feed
    lengths: Lengths
    test_loader: Iterable[Any] | None
    test_interval: int
    needs_all: bool
    """Whether a forward pass needs a batch on every rank, in every epoch."""
    may_ask_ahead: bool
    counts_rows: bool
    """Whether this rank counts samples: the first of those that see the same data, stages of a pipeline among them."""
    sums: StepSums
    equal: bool = True
    """Whether all ranks have a batch for every pass of this epoch, or none has."""
    ahead: bool = False
    """Whether the batch of the next step is fetched, and its sums started, before a step is made."""
    resumed: tuple[Any, Any] | None = None
    """From a LoadCheckpointHook until the hooks have it: (states of the hooks, random streams of the step)."""


class _EndOfTraining(Exception):
    """The loop ends after this step: raised inside `Engine.batches` too, by ranks that have no batch of their own."""


class _AgreedError(Exception):
    """Carries an error that every rank has raised at the same point, so that they may still communicate."""

    def __init__(self, error: ColonnadeError) -> None:
        super().__init__(str(error))
        self.error = error


class Trainer:
    """Trains the model of an engine.

    `states` is a dict that hooks share; metrics are in `states["metrics"]["train"]` and `["test"]`. A step is an
    optimizer step, of `gradient_accumulation` batches; `cur_step` counts those that have been made, `cur_epoch` the
    epochs that are over. All methods are called by every rank together.
    """

    def __init__(
        self,
        engine: Engine,
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
        self.clock = PhaseClock(self.context.device)
        """Where the time of the step that is being made goes."""
        self._cur_epoch = self._cur_step = 0
        self._place = EpochPosition()
        self._hooks = HookList(self, [])
        self._exchange = Exchange(self.context)
        self._book = RecordBook(self.clock)
        self._fit: FitState | None = None
        self._wants_stop = ""
        self._wants_exit = False

    # -- train, evaluate, predict -------------------------------------------------------------------------

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
        if epochs is None and max_steps is None:
            raise ConfigError("fit needs epochs= or max_steps=, or it would never end", code="C092")
        for name, value in (("epochs", epochs), ("max_steps", max_steps), ("test_interval", test_interval)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} is a whole number from 1 on, not {value!r}", code="C092")
        self.max_epochs, self.max_steps = epochs, max_steps
        self.returns_output = return_output_label
        self._attach([*(hooks or ()), *([ProgressHook()] if display_progress else [])])

        # What is wrong with a loader is said on every rank before the first step.
        context, engine = self.context, self.engine
        lengths = read_lengths(train_dataloader, context)
        if test_dataloader is not None:
            read_lengths(test_dataloader, context)
        self.steps_per_epoch = -(-lengths.longest // engine.accumulation) if lengths.longest is not None else None
        with agree(self.context):
            self._check_last_batch(train_dataloader)

        # On a device nobody waits for the sums between two steps: the next batch is fetched before a step is made, the
        # sums start then and are there by the end of the step. The error of a hook is raised one step later for it.
        # A loader with a state of its own says where it is when it is asked, so it is not read ahead.
        device = context.device.type
        fit = FitState(
            hooks=self._hooks,
            feed=Feed(train_dataloader, context),
            lengths=lengths,
            test_loader=test_dataloader,
            test_interval=test_interval,
            needs_all=moves_together(lengths, context),
            may_ask_ahead=device in ASKS_AHEAD and not is_alone(context) and not is_stateful(train_dataloader),
            counts_rows=is_first_with_data(context, pipeline=True),
            sums=StepSums(self._exchange, LAG.get(device, 0), partial(self._hooks.call, "on_record")),
        )

        self.failed = self.stopping = self._wants_exit = False
        self._wants_stop = self.stop_reason = ""
        self._fit = fit
        context.waits.clock = self.clock
        try:
            engine.train()
            try:
                self._train(fit)
            except _AgreedError as agreed:
                # All ranks are here: hooks may still communicate. Any other error ends this rank at once.
                self.failed = True
                fit.hooks.call("after_train")
                raise agreed.error from agreed.error.__cause__
            fit.hooks.call("after_train")
            self.agree()
        finally:
            context.waits.clock = None
            self._hooks.close()
            self._fit = None
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
            default: list[HookLike] = [{"type": "LossHook"}] if self.engine.gives_loss else []
            self._attach(hooks if hooks is not None else default)
        self.returns_output = return_output_label
        run_test(self, dataloader, self._hooks, self._exchange)
        self.agree()
        return self.metric_values("test")

    def predict(self, dataloader: Iterable[Any]) -> Any:
        """The outputs for all samples of a loader, joined in the order of the dataset, on the host of every rank.

        With a sampler, samples are in the order of their indices and none is there twice. Loaders without indices
        are joined rank after rank.
        """
        return predict(self, dataloader, self._hooks, self._exchange)

    # -- for hooks ----------------------------------------------------------------------------------------

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
        if self._fit is not None:
            self._fit.sums.wait()
            self._fit.sums.add(self._book.draft())
            self._fit.sums.drain()

    def agree(self) -> None:
        """Raise on every rank what any rank holds; returns if none does. Collective."""
        with agree(self.context):
            if self._hooks.held is not None:
                raise self._hooks.held

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
        return self._fit is not None

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

    # -- checkpoints --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything beside model and optimizer, for `CheckpointManager.save(extra=)`. Collective: hooks are asked."""
        assert self._fit is not None
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
            "data": self._fit.feed.own_state(),
            **self.engine.extra_state(),
        }

    def load_state(self, manager: CheckpointManager, model: nn.Module | None = None, step: int | None = None) -> None:
        """Load a checkpoint, the newest or that of `step`, and go on where it was saved. Collective; all or nothing.

        Hooks get their states when the epoch has begun.
        """
        engine, fit = self.engine, self._fit
        assert fit is not None
        info = manager.load(model or engine.model, engine.optimizer, step=step, rest=_ExtraOfRun(engine))
        if self.context.get_global_rank() == 0:
            tell_launcher(info.step, info.folder, by_trainer=True)
        extra, place = info.extra, info.extra["trainer"]
        self.cur_epoch = place["epoch"]
        self._cur_step = place["step"]
        # Random streams and the state of a loader are those of a rank: on another layout there is no such rank.
        own = extra.get("data") if info.same_layout else None
        self._place = fit.feed.load_state_dict(EpochPosition(**place["data"]), own)
        self.epoch_done = place["epoch_done"]
        fit.resumed = (extra["hooks"], random_state(self.context))

    # -- the run ------------------------------------------------------------------------------------------

    def _train(self, fit: FitState) -> None:
        """Epochs and evaluations, until there have been enough or a rank wants to stop."""
        self._call(fit, "before_train")
        if fit.resumed is not None and (self._place.batches == 0 or self.epoch_done):
            # The checkpoint is of the end of an epoch: no loader will put the random streams back on its way.
            set_random_state(self._load_hook_states(fit), self.context)
        while not self._is_over():
            # A run that was saved after the last batch of an epoch goes on with the evaluation behind it.
            if not self.epoch_done:
                self._train_epoch(fit)
            # A stop by a signal must not wait for an evaluation; a stop in the middle of an epoch has none behind it.
            if self.stopping and (self._wants_exit or not self.epoch_done):
                break
            if fit.test_loader is not None and (self.cur_epoch + 1) % fit.test_interval == 0:
                run_test(self, fit.test_loader, self._hooks, self._exchange)
                self._agree()
                self._agree_to_stop()
            if not self.epoch_done:
                break  # max_steps ended it
            self.cur_epoch += 1
        if self.stopping:
            self.logger.info(f"stopped after step {self.cur_step}: {self.stop_reason}")

    def _is_over(self) -> bool:
        has_epochs = self.max_epochs is not None and self.cur_epoch >= self.max_epochs
        return self.stopping or has_epochs or self._has_enough_steps()

    def _has_enough_steps(self) -> bool:
        return self.max_steps is not None and self.cur_step >= self.max_steps

    def _train_epoch(self, fit: FitState) -> None:
        """All batches of an epoch, or those behind the place where it was left."""
        self._call(fit, "before_train_epoch")
        # Metrics are reset when an epoch begins, so a resumed one gives the hooks their states only now.
        streams = self._load_hook_states(fit) if fit.resumed is not None else None
        self._book.restart()  # what hooks did between two epochs is no time of a step

        # Ranks that run out of batches go on without, inside `Engine.batches`, which costs a message in each step. It is not
        # needed where all ranks have equally many steps left, and not possible where every pass needs a batch of each rank.
        engine, left = self.engine, fit.lengths.longest
        if left is not None:
            left -= fit.feed.batches_behind(self._place)
        whole_steps = fit.lengths.equal and left is not None and left % engine.accumulation == 0
        fit.equal = fit.needs_all or (whole_steps and not fit.feed.inside_batch(self._place))
        fit.ahead = fit.may_ask_ahead and fit.equal

        # Both are closed at once: what the engine keeps while ranks may run out must not outlive the loop.
        fetched = self._fetched(fit, streams)
        batches: Iterator[Any]
        if fit.equal:
            batches = self._equal_batches(fit, fetched)
        else:
            batches = engine.batches(fetched, partial(self._train_step, fit, NO_BATCH))
        with closing(fetched), closing(batches):  # type: ignore[type-var]
            try:
                for batch in batches:
                    self._train_step(fit, batch)
                ended = True
            except _EndOfTraining:
                ended = False
        self._agree()
        self.epoch_done = ended
        if ended and self._place.batches == 0:
            raise ConfigError(
                f"epoch {self.cur_epoch} had no batches on any rank; there is nothing to train on", code="C090"
            )

        # Metrics of the epoch take in the records of all its steps, so these are finished first.
        self.settle()
        if not self.stopping or ended:
            self._call(fit, "after_train_epoch")
            self._agree_to_stop()

    def _train_step(self, fit: FitState, batch: Any) -> None:
        """Learn from one batch, which may end an optimizer step. Collective.

        With NO_BATCH the engine has just made a step of the other ranks, in which this one took part without a batch.
        """
        engine = self.engine
        if batch is NO_BATCH:
            output, label, loss, stepped = None, None, None, True
            self.batch_weight = (None, 0.0)
        else:
            fit.hooks.call("before_train_iter")
            engine.zero_grad()
            output, label, loss = engine.execute_schedule(iter((batch,)), return_output_label=self.returns_output)
            self.batch_weight = weigh(loss, engine.loss_count, engine.schedule.batch_size)
            stepped = engine.step()
            self._book.add_pass(*self.batch_weight, engine.schedule.batch_size if fit.counts_rows else 0)

        # The place moves before the hooks are called: a checkpoint that one of them saves has this step behind it.
        self.step_done = stepped
        if stepped:
            self._cur_step += 1
            self._place = fit.feed.after(self._place, engine.accumulation)
            self._book.end_step(self.cur_step, self.cur_epoch, engine)
        fit.hooks.call("after_train_iter", output, label, loss)
        if not stepped:
            return

        # All ranks agreed on `stopping` before this step, and count steps alike: they leave the loop together.
        if self.stopping or self._has_enough_steps():
            self._agree()
            raise _EndOfTraining
        # With equal batches the sums start where the next batch is fetched. Otherwise `Engine.batches` tells who has one.
        if not fit.equal:
            self._start_sums(fit, has_batch=True)
            self._finish_sums(fit, has_batch=True)
        # The numbers of this step go with the sums of a later one: reading them now would wait for the device.
        fit.sums.add(self._book.draft())

    # -- batches, and what the ranks agree on between two steps -------------------------------------------

    def _equal_batches(self, fit: FitState, fetched: Iterator[Any]) -> Iterator[Any]:
        """Batches that all ranks have; raises on all of them when one has run out before the others."""
        batch = next(fetched, NO_BATCH)
        self._start_sums(fit, batch is not NO_BATCH)
        while self._finish_sums(fit, batch is not NO_BATCH):
            if fit.ahead:
                fit.feed.look_ahead()
                following = next(fetched, NO_BATCH)
                self._start_sums(fit, following is not NO_BATCH)
                yield batch
            else:
                yield batch
                following = next(fetched, NO_BATCH)
                self._start_sums(fit, following is not NO_BATCH)
            batch = following

    def _fetched(self, fit: FitState, streams: Any) -> Iterator[Any]:
        """The batches of the loader. An error of it looks like its end, and is held until all ranks can raise it."""
        clock = self.clock
        try:
            batches = fit.feed.open(self.cur_epoch, self._place, streams)
            while True:
                before = clock.enter("data")
                batch = next(batches, NO_BATCH)
                clock.enter(before)
                if batch is NO_BATCH:
                    return
                yield batch
        except Exception as error:
            failure = TrainerError(
                f"the training data loader failed in epoch {self.cur_epoch}, after step {self.cur_step}: "
                f"{type(error).__name__}: {error}",
                code="C090",
            )
            failure.__cause__ = error
            fit.hooks.hold(failure)

    def _start_sums(self, fit: FitState, has_batch: bool) -> None:
        """Begin to add up the flags of all ranks for the next step. Collective; waits for nobody."""
        is_held = fit.hooks.held is not None
        fit.sums.start([is_held, has_batch, not has_batch, bool(self._wants_stop), self._wants_exit])

    def _finish_sums(self, fit: FitState, has_batch: bool) -> bool:
        """Whether there are batches for the next step; raises on all ranks what any of them holds.

        `has_batch` is what this rank gave to the `_start_sums` that this waits for.
        """
        errors, have, have_not, stops, exits = fit.sums.finish()
        if errors:
            self._agree()
        self._note_stop(stops, exits)
        if have and have_not:
            if not has_batch:
                error = TrainerError(
                    f"this rank ran out of batches in epoch {self.cur_epoch} after step {self.cur_step} while "
                    f"others had more, and this layout needs all of them in every pass. Give all ranks equally many batches.",
                    code="C090",
                )
                fit.hooks.hold(error)
            self._agree()
        # With `ahead` these flags are from before the step that was just made: that was the one to stop after.
        if have and fit.ahead and self.stopping and self.step_done:
            raise _EndOfTraining
        return bool(have)

    def _agree_to_stop(self) -> None:
        """Add up the wishes to stop where no step follows, at the end of an epoch or an evaluation. Collective."""
        self._note_stop(*self._exchange.sum([float(bool(self._wants_stop)), float(self._wants_exit)]))

    def _note_stop(self, stops: float, exits: float) -> None:
        if stops and not self.stopping:
            self.stopping = True
            self.stop_reason = self._wants_stop or "asked for by another rank"
        self._wants_exit = self._wants_exit or bool(exits)

    def _load_hook_states(self, fit: FitState) -> Any:
        """Give the hooks their states of the checkpoint; returns the random streams it had."""
        assert fit.resumed is not None
        (states, streams), fit.resumed = fit.resumed, None
        fit.hooks.load_state_dict(states)
        self._agree()
        return streams

    def _call(self, fit: FitState, point: str) -> None:
        fit.hooks.call(point)
        self._agree()

    def _agree(self) -> None:
        """`agree`, whose error `fit` then knows to be one of all ranks."""
        try:
            self.agree()
        except ColonnadeError as error:
            raise _AgreedError(error) from None

    # -- before a run -------------------------------------------------------------------------------------

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

    def _check_last_batch(self, loader: Any) -> None:
        """Refuse now, and not at the end of the first epoch, a last batch of fewer rows than the pipeline has micro-batches.

        Only where a batch has as many rows as samples, and the run does not end before it.
        """
        schedule = self.engine.schedule
        pieces, sizes = getattr(schedule, "num_microbatches", None), last_batch(loader)
        makes_rows = schedule.data_process_func or getattr(schedule, "_stage_data_func", None)
        if not isinstance(pieces, int) or makes_rows or sizes is None or not 0 < sizes.last < pieces:
            return
        if self.max_steps is not None and self.max_steps <= sizes.whole // self.engine.accumulation:
            return
        raise ScheduleError(
            f"the last batch of an epoch will have {sizes.last} rows ({sizes.samples} samples on this rank in batches of "
            f"{sizes.size}), and cannot be cut into {pieces} micro-batches. Set drop_last=True on the data loader, use another "
            f"size of batches, or set num_microbatches to {sizes.last} or less.",
            code="C052",
        )


class _ExtraOfRun:
    """What a run takes of a checkpoint beside weights and optimizer; refuses one that no trainer has saved."""

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

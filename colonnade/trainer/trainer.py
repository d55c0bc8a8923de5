"""The Trainer runs training, evaluation and prediction of an engine, with hooks, on any parallel layout.

`fit` sets a run up and tears it down. `_train` is the loop over epochs and evaluations, `_train_epoch` the loop over batches,
`_train_step` one batch. Between two steps all ranks must take the same branch, so they all-reduce a few flags on the host
(`_start_sums`, `_finish_sums`: an error is pending, a batch is available, a stop is requested), together with the loss of an
earlier step. Therefore all ranks continue, all stop, or all raise.
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
from colonnade.engine.schedule.schedules import BaseSchedule
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
    count_tokens,
    is_first_with_data,
    slots_of,
    weigh,
)

ASKS_AHEAD = {"cuda"}
"""Devices that must not idle while the host agrees on flags; on others every gradient reduction blocks the host anyway."""

LAG = {"cuda": 1}
"""Additional steps before metrics are read, on devices that are still computing the last step when the flags are sent."""


@dataclass
class FitState:
    """The state of one `fit` call."""

    hooks: HookList
    """The hooks of `fit`, even while a hook runs `evaluate` with other hooks."""
    feed: Feed
    lengths: Lengths
    test_loader: Iterable[Any] | None
    test_interval: int
    needs_all: bool
    """Whether a forward pass needs a batch on every rank (expert parallelism, ZeRO stage 3)."""
    may_ask_ahead: bool
    counts_rows: bool
    """Whether this rank counts samples: the first of the ranks with the same data, including other pipeline stages."""
    sums: StepSums
    equal: bool = True
    """Whether, for every micro-step of this epoch, all ranks have a batch or none has."""
    ahead: bool = False
    """Whether the batch of the next step is fetched, and its flags are sent, before the current step runs."""
    resumed: tuple[Any, Any] | None = None
    """(hook states, random streams) of a loaded checkpoint, until the hooks have received them."""


class _EndOfTraining(Exception):
    """Ends the loop after this step; also raised inside `Engine.batches`, on ranks without a batch."""


class _AgreedError(Exception):
    """Wraps an error that all ranks have raised at the same point, so that they can still communicate."""

    def __init__(self, error: ColonnadeError) -> None:
        super().__init__(str(error))
        self.error = error


class Trainer:
    """Trains the model of an engine.

    `states` is a dict that hooks share; metrics are in `states["metrics"]["train"]` and `["test"]`. A step is an optimizer
    step over `gradient_accumulation` batches; `cur_step` counts completed steps and `cur_epoch` completed epochs.
    Collective over the world: all ranks call every method.

    Args:
        engine: the engine that `initialize` returns first.
        logger: default: `get_dist_logger()`.
        schedule: replaces the schedule of the engine.

    Example::

        from colonnade.trainer import hooks

        gpc = colonnade.launch({})
        model = nn.Linear(4, 2)
        engine, *_ = colonnade.initialize(model, torch.optim.AdamW(model.parameters()), nn.MSELoss())
        trainer = colonnade.Trainer(engine)
        trainer.fit([(torch.ones(8, 4), torch.ones(8, 2))] * 10, epochs=2, hooks=[hooks.LossHook()])
        print(trainer.evaluate([(torch.ones(8, 4), torch.ones(8, 2))]))
    """

    def __init__(
        self,
        engine: Engine,
        logger: DistributedLogger | None = None,
        schedule: BaseSchedule | None = None,
    ) -> None:
        if not isinstance(engine, Engine):
            raise ConfigError(
                f"Trainer needs the engine, but got a {type(engine).__name__}. Pass the first value that "
                "initialize() returns.",
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
        """Whether the last batch completed an optimizer step."""
        self.epoch_done = False
        """Whether all batches of the epoch have been used."""
        self.stopping = False
        """Whether all ranks have agreed to stop after the current step."""
        self.stop_reason = ""
        self.failed = False
        self.batch_weight: Weight = (None, 0.0)
        """(sum of the loss, weight) of the last batch, on ranks that have the loss."""
        self.returns_output = True
        """Whether hooks receive outputs and labels."""
        self.clock = PhaseClock(self.context.device)
        """The time of the current step, by phase."""
        self._cur_epoch = self._cur_step = 0
        self._place = EpochPosition()
        self._hooks = HookList(self, [])
        self._exchange = Exchange(self.context)
        self._slots = [] if is_alone(self.context) else slots_of(self.context.world_size)
        self._book = RecordBook(self.clock, self._slots, self.context.get_global_rank())
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
        """Train until `epochs` epochs or `max_steps` steps are complete, counted from the start of the run.

        Ranks may have different numbers of batches, unless their forward passes communicate with each other.
        Collective over the world.

        Args:
            train_dataloader: the batches of this rank.
            epochs: stop after this many epochs.
            max_steps: stop after this many optimizer steps.
            test_dataloader: data for evaluation during training.
            test_interval: epochs between two evaluations.
            hooks: hooks, or dicts as in a config.
            display_progress: add a ProgressHook.
            return_output_label: whether hooks receive outputs and labels.

        Raises:
            TrainerError: an error in a hook or loader of any rank, on every rank.
            SystemExit: code 75 after a stop by a signal (`StopOnSignal`), after all cleanup.
        """
        if epochs is None and max_steps is None:
            raise ConfigError("fit needs an end. Pass epochs= or max_steps=.", code="C092")
        for name, value in (("epochs", epochs), ("max_steps", max_steps), ("test_interval", test_interval)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} is {value!r}; it must be an int >= 1", code="C092")
        self.max_epochs, self.max_steps = epochs, max_steps
        self.returns_output = return_output_label
        self._attach([*(hooks or ()), *([ProgressHook()] if display_progress else [])])

        # Errors of a loader are raised on every rank before the first step.
        context, engine = self.context, self.engine
        lengths = read_lengths(train_dataloader, context)
        if test_dataloader is not None:
            read_lengths(test_dataloader, context)
        self.steps_per_epoch = -(-lengths.longest // engine.accumulation) if lengths.longest is not None else None
        with agree(self.context):
            self._check_last_batch(train_dataloader)

        # A GPU must not idle while the host waits for flags of other ranks. The next batch is therefore fetched, and its flags
        # are sent, before the step; they have arrived when it ends. The price: an error in a hook is raised one step later.
        # A stateful loader reports its position when asked, which would be one batch too far, so it is not read ahead.
        device = context.device.type
        fit = FitState(
            hooks=self._hooks,
            feed=Feed(train_dataloader, context),
            lengths=lengths,
            test_loader=test_dataloader,
            test_interval=test_interval,
            needs_all=moves_together(lengths, context),
            may_ask_ahead=device in ASKS_AHEAD and not is_alone(context) and not is_stateful(train_dataloader),
            counts_rows=is_first_with_data(context, rows=True),
            sums=StepSums(
                self._exchange, LAG.get(device, 0), partial(self._hooks.call, "on_record"), 4 + len(self._slots)
            ),
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
                # All ranks have raised this error, so hooks may still communicate. Any other error ends this rank at once.
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
        """Run the model over test data and return the metrics over the samples of all ranks. Collective over the world.

        Args:
            dataloader: the test batches of this rank.
            hooks: default: those of `fit`, or a LossHook.
            return_output_label: whether hooks receive outputs and labels.
        """
        if hooks is not None or not self._hooks.hooks:
            default: list[HookLike] = [{"type": "LossHook"}] if self.engine.gives_loss else []
            self._attach(hooks if hooks is not None else default)
        self.returns_output = return_output_label
        run_test(self, dataloader, self._hooks, self._exchange)
        self.agree()
        return self.metric_values("test")

    def predict(self, dataloader: Iterable[Any]) -> Any:
        """Return the outputs for all samples of a loader, in dataset order, on the host of every rank.

        Collective over the world.

        With a sampler, outputs are sorted by sample index and duplicates are removed. Without indices, the outputs of
        the ranks are concatenated in rank order.
        """
        return predict(self, dataloader, self._hooks, self._exchange)

    # -- for hooks ----------------------------------------------------------------------------------------

    def request_stop(self, reason: str, leave: bool = False) -> None:
        """Stop all ranks after the next step; with `leave`, `fit` exits the process with code 75."""
        self._wants_stop = self._wants_stop or reason
        self._wants_exit = self._wants_exit or leave

    def log(self, values: Mapping[str, Tensor | float]) -> None:
        """Add numbers to the record of the last step. Tensors are read one step later, to avoid a synchronization."""
        self._book.add(values)

    def metric_values(self, kind: str) -> dict[str, float]:
        """Return the last gathered metrics of "train" or "test", by name."""
        return {name: metric.get_accumulated_value() for name, metric in self.states["metrics"][kind].items()}

    def settle(self) -> None:
        """Complete the records of all finished steps now, instead of one step later. Collective over the world."""
        if self._fit is not None:
            self._fit.sums.wait()
            self._fit.sums.add(self._book.draft())
            self._fit.sums.drain()

    def agree(self) -> None:
        """Raise the pending error of any rank on every rank; return if there is none. Collective over the world."""
        with agree(self.context):
            if self._hooks.pending is not None:
                raise self._hooks.pending

    @property
    def cur_epoch(self) -> int:
        """The index of the current epoch, from 0. Set it before `fit` to start at another epoch."""
        return self._cur_epoch

    @cur_epoch.setter
    def cur_epoch(self, epoch: int) -> None:
        self._cur_epoch, self._place, self.epoch_done = epoch, EpochPosition(), False

    @property
    def cur_step(self) -> int:
        """The number of completed optimizer steps."""
        return self._cur_step

    @property
    def is_fitting(self) -> bool:
        """Whether `fit` is running; distinguishes an evaluation inside `fit` from a separate one."""
        return self._fit is not None

    @property
    def hooks(self) -> list[BaseHook]:
        """The hooks in calling order."""
        return self._hooks.hooks

    @property
    def total_steps(self) -> int | None:
        """The maximum number of steps of the run; None if it is unknown."""
        by_epochs = None
        if self.max_epochs is not None and self.steps_per_epoch is not None:
            by_epochs = self.max_epochs * self.steps_per_epoch
        known = [limit for limit in (self.max_steps, by_epochs) if limit is not None]
        return min(known) if known else None

    # -- checkpoints --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a run except model and optimizer, for `CheckpointManager.save(extra=)`.

        Collective over the world.
        """
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
        """Load the newest checkpoint or that of `step`, and resume there. Collective over the world.

        If loading fails, nothing is changed. Hooks receive their states after the epoch has started, because
        `before_train_epoch` resets metrics.
        """
        engine, fit = self.engine, self._fit
        assert fit is not None
        info = manager.load(model or engine.model, engine.optimizer, step=step, rest=_ExtraOfRun(engine))
        if self.context.get_global_rank() == 0:
            tell_launcher(info.step, info.folder, by_trainer=True)
        extra, place = info.extra, info.extra["trainer"]
        self.cur_epoch = place["epoch"]
        self._cur_step = place["step"]
        # The state of a loader belongs to one rank of the saved layout; another layout has no corresponding rank.
        own = extra.get("data") if info.same_layout else None
        self._place = fit.feed.load_state_dict(EpochPosition(**place["data"]), own)
        self.epoch_done = place["epoch_done"]
        fit.resumed = (extra["hooks"], random_state(self.context))

    # -- the run ------------------------------------------------------------------------------------------

    def _train(self, fit: FitState) -> None:
        """Run epochs and evaluations until the limit is reached or a rank requests a stop."""
        self._call(fit, "before_train")
        if fit.resumed is not None and (self._place.batches == 0 or self.epoch_done):
            # At the end of an epoch there is no loader to restore the random streams, so it is done here.
            set_random_state(self._load_hook_states(fit), self.context)
        while not self._is_over():
            # A run that was saved after the last batch of an epoch resumes with the evaluation after that epoch.
            if not self.epoch_done:
                self._train_epoch(fit)
            # A stop by a signal must not wait for an evaluation, and a stop within an epoch has no evaluation after it.
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
        """Train on all batches of an epoch, or on the remaining ones after a resume."""
        self._call(fit, "before_train_epoch")
        # The call above resets metrics, so the hooks of a resumed run receive their states only now.
        streams = self._load_hook_states(fit) if fit.resumed is not None else None
        self._book.restart()  # the time of hooks between two epochs belongs to no step

        # `Engine.batches` lets ranks without batches take part in the steps of the others, at the cost of one message per step.
        # This is unnecessary if all ranks have the same number of steps left, and impossible if every forward pass needs a
        # batch on each rank.
        engine, left = self.engine, fit.lengths.longest
        if left is not None:
            left -= fit.feed.batches_behind(self._place)
        whole_steps = fit.lengths.equal and left is not None and left % engine.accumulation == 0
        fit.equal = fit.needs_all or (whole_steps and not fit.feed.inside_batch(self._place))
        fit.ahead = fit.may_ask_ahead and fit.equal

        # Both generators are closed at once: state that the engine keeps for uneven batches must not outlive the loop.
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
                f"epoch {self.cur_epoch} has no batches on any rank. Check the data loader and its sampler.",
                code="C090",
            )

        # The metrics of the epoch include all its steps, so their records are completed first.
        self.settle()
        if not self.stopping or ended:
            self._call(fit, "after_train_epoch")
            self._agree_to_stop()

    def _train_step(self, fit: FitState, batch: Any) -> None:
        """Train on one batch, which may complete an optimizer step. Collective over the world.

        NO_BATCH: the engine has just taken part in a step of the other ranks, without a batch on this rank.
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
            counts = (engine.schedule.batch_size, count_tokens(batch)) if fit.counts_rows else (0, 0)
            self._book.add_pass(*self.batch_weight, *counts)

        # The position advances before the hooks run, because a checkpoint that a hook saves includes this step.
        self.step_done = stepped
        if stepped:
            self._cur_step += 1
            self._place = fit.feed.after(self._place, engine.accumulation)
            self._book.end_step(self.cur_step, self.cur_epoch, engine)
        fit.hooks.call("after_train_iter", output, label, loss)
        if not stepped:
            return

        # All ranks agreed on `stopping` before this step and have the same step count, so they leave the loop together.
        if self.stopping or self._has_enough_steps():
            self._agree()
            raise _EndOfTraining
        # With equal batches, `_equal_batches` sends the flags when it fetches the next batch. Otherwise `Engine.batches` finds
        # out which ranks have a batch, and the flags are sent here.
        if not fit.equal:
            self._start_sums(fit, has_batch=True)
            self._finish_sums(fit, has_batch=True)
        # The metrics of this step are sent with the flags of a later one; reading them now would synchronize the device.
        fit.sums.add(self._book.draft())

    # -- batches, and the flags that ranks exchange between two steps --------------------------------------

    def _equal_batches(self, fit: FitState, fetched: Iterator[Any]) -> Iterator[Any]:
        """Yield batches while all ranks have one; raises on all ranks if only some ranks have run out."""
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
        """The batches of the loader. An error ends the iteration and stays pending until all ranks can raise it."""
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
        """Start the all-reduce of the flags for the next step. Collective over the world; does not block."""
        has_error = fit.hooks.pending is not None
        fit.sums.start([has_error, has_batch, not has_batch, bool(self._wants_stop), self._wants_exit])

    def _finish_sums(self, fit: FitState, has_batch: bool) -> bool:
        """Wait for the flags; return whether there are batches, and raise the pending error of any rank on all ranks.

        `has_batch` is the value that this rank passed to the matching `_start_sums`.
        """
        errors, have, have_not, stops, exits = fit.sums.finish()
        if errors:
            self._agree()
        self._note_stop(stops, exits)
        if have and have_not:
            if not has_batch:
                error = TrainerError(
                    f"this rank ran out of batches in epoch {self.cur_epoch} after step {self.cur_step}, but other "
                    "ranks have more. In this layout every forward pass needs all ranks. Give all ranks the same "
                    "number of batches.",
                    code="C090",
                )
                fit.hooks.hold(error)
            self._agree()
        # With `ahead` these flags were sent before the step that has just ended, which is the one to stop after.
        if have and fit.ahead and self.stopping and self.step_done:
            raise _EndOfTraining
        return bool(have)

    def _agree_to_stop(self) -> None:
        """Agree on a stop where no step follows: after an epoch or an evaluation. Collective over the world."""
        self._note_stop(*self._exchange.sum([float(bool(self._wants_stop)), float(self._wants_exit)]))

    def _note_stop(self, stops: float, exits: float) -> None:
        if stops and not self.stopping:
            self.stopping = True
            self.stop_reason = self._wants_stop or "requested by another rank"
        self._wants_exit = self._wants_exit or bool(exits)

    def _load_hook_states(self, fit: FitState) -> Any:
        """Load the hook states of the checkpoint; returns its random streams."""
        assert fit.resumed is not None
        (states, streams), fit.resumed = fit.resumed, None
        fit.hooks.load_state_dict(states)
        self._agree()
        return streams

    def _call(self, fit: FitState, point: str) -> None:
        fit.hooks.call(point)
        self._agree()

    def _agree(self) -> None:
        """`agree`, with the error marked as raised on all ranks."""
        try:
            self.agree()
        except ColonnadeError as error:
            raise _AgreedError(error) from None

    # -- before a run -------------------------------------------------------------------------------------

    def _attach(self, hooks: Iterable[HookLike]) -> None:
        """Attach these hooks; an error in one is raised on every rank before the run starts."""
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
        """Raise at the start, not at the end of the first epoch, if the last batch has fewer rows than micro-batches.

        Skipped if rows may differ from samples, or if the run ends before the last batch.
        """
        schedule = self.engine.schedule
        pieces, sizes = getattr(schedule, "num_microbatches", None), last_batch(loader)
        makes_rows = schedule.data_process_func or getattr(schedule, "_stage_data_func", None)
        if not isinstance(pieces, int) or makes_rows or sizes is None or not 0 < sizes.last < pieces:
            return
        if self.max_steps is not None and self.max_steps <= sizes.whole // self.engine.accumulation:
            return
        raise ScheduleError(
            f"the last batch of an epoch will have {sizes.last} rows, too few for {pieces} micro-batches, "
            f"because this rank has {sizes.samples} samples in batches of {sizes.size}. There are three remedies. 1. "
            f"Set drop_last=True on the data loader. 2. Use another batch size. 3. Set num_microbatches to {sizes.last} "
            "or less.",
            code="C052",
        )


class _ExtraOfRun:
    """The part of a checkpoint in addition to weights and optimizer. Rejects a checkpoint that was not saved by a Trainer."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, Any]:
        return {"trainer": {"data": {}}, "hooks": {}, **self._engine.extra_state()}

    def load_state_dict(self, extra: Mapping[str, Any]) -> None:
        missing = [name for name in ("trainer", "hooks") if name not in extra]
        if missing:
            raise CheckpointError(
                f"the checkpoint has no {listed(missing)}, because no SaveCheckpointHook saved it. Load the "
                "checkpoint with a CheckpointManager before fit."
            )
        EpochPosition(**extra["trainer"]["data"])
        self._engine.load_extra_state(extra)

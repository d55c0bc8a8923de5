"""Engine: the model, its optimizer and its loss as one thing to call in a training loop.

`Engine.backward` and `Engine.step` are the protocol of a training step; `step` reads from the check of the calls to the step of the
optimizer. `LossBook` has the factor that losses over uneven data need, `Observer` is for those who look on, and `LastStep` and
`WholeWeights` are the parts of `Engine` that only answer questions: about the last step, and about the weights.
"""

from __future__ import annotations

import importlib
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colonnade.comm.host_copy import HostCopy
from colonnade.comm.messages import error_of, gather_from_all, note_of
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.checks import LoopWatch, SameBatch, refuse_batch
from colonnade.engine.gradient_sync import GradientSync
from colonnade.engine.memory import MemoryTable, memory_table
from colonnade.engine.model import TrainingLoss, family, own_format_of
from colonnade.engine.precision import LossScaler, Precision, PrecisionTable, precision_table
from colonnade.engine.schedule.base import BaseSchedule, StepResult, checked_result
from colonnade.engine.schedule.loss import Count, DivisionWatch, LossForm, MeanWatch, count_on, split_loss
from colonnade.engine.stepper import Stepper
from colonnade.errors import CheckpointError, GradientError, ScheduleError, listed
from colonnade.gradients.ledger import Ledger
from colonnade.gradients.synchroniser import StepOutcome, Synchroniser
from colonnade.gradients.uneven import USE_ONE_FORM
from colonnade.logging import get_dist_logger
from colonnade.optim.engine_optimizer import EngineOptimizer
from colonnade.paths import local_path

# --- The last step ---


class LastStep:
    """The part of `Engine` that answers questions about the last step: norms, clipping, whether it was dropped."""

    _stepper: Stepper
    _failed: bool

    @property
    def grad_norm(self) -> Tensor | None:
        """The gradient norm of the last step before clipping, as a device tensor; None if clipping is off."""
        return self._stepper.last.norm if self._stepper.last is not None else None

    def grad_norms(self) -> dict[str, Tensor]:
        """The norm of every group, layer or parameter at the last step, out of the same collective."""
        return self._stepper.norms()

    @property
    def skipped_steps(self) -> int:
        """How many steps were dropped because their gradient was not finite, or a spike. Waits for the last one."""
        self._stepper.report_skips(wait=True)
        return self._stepper.skips.total

    @property
    def last_step_skipped(self) -> bool:
        """Whether the last step was dropped. Waits for its norm."""
        self._stepper.report_skips(wait=True)
        return self._stepper.skips.last

    @property
    def clip_divisor(self) -> Tensor | None:
        """What the last step's gradient was divided by to clip it, at most: 1 if it was not; None if clipping is off."""
        return self._stepper.last.divisor.amax() if self._stepper.last is not None else None

    @property
    def last_skip_flag(self) -> HostCopy | None:
        """Whether the last step was dropped, as a number that is on its way to the host; None before the first."""
        return HostCopy(torch.ones((), device="cpu")) if self._failed else self._stepper.skips.flag

    @property
    def may_skip(self) -> bool:
        """Whether a step may be dropped for its gradient's sake."""
        return self._stepper.policy is not None


# --- Whole weights ---


class WholeWeights:
    """The part of `Engine` that gives whole weights: at run time, and as folders that transformers loads. Collective."""

    context: ParallelContext

    @property
    def model(self) -> nn.Module:
        raise NotImplementedError

    @property
    def engine_optimizer(self) -> EngineOptimizer:
        raise NotImplementedError

    def full_state_dict(self, to: str | Path = "all", *, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """The whole weights and persistent buffers, on the CPU, whatever the layout; a tied weight under each name.

        `to="all"` gives them to every rank, `to="first"` to rank 0 alone: elsewhere the dict is empty. Any other text is
        the safetensors file to write, one tensor at a time, and the dict is empty everywhere. With `dtype`, floating point
        tensors have that type. A plain model takes them by `load_state_dict`, unless its modules have extra state.
        """
        if (
            to not in ("all", "first")
            and local_path(to, "the file of engine.full_state_dict()", CheckpointError).suffix != ".safetensors"
        ):
            raise CheckpointError(f"to is 'all', 'first' or the name of a .safetensors file to write, not {str(to)!r}")
        with self.context.waits.together("engine.full_state_dict()"):
            return self._full_state_dict(to, dtype)

    def _full_state_dict(self, to: str | Path, dtype: torch.dtype | None) -> dict[str, Tensor]:
        # A run that exports nothing imports nothing of it.
        from colonnade.checkpoint.full_weights import WholeTensors, save_full

        self.wait_for_weights()
        whole = WholeTensors(self.model, self.context)
        if to not in ("all", "first"):
            save_full(whole, to, self.context, dtype)
            return {}
        found: dict[str, Tensor] = {}
        for record in whole.records:
            value = whole.gather(record) if to == "all" else whole.gather_apart([(record, 0)])
            if value is not None:
                value = value.to(dtype) if dtype is not None and value.is_floating_point() else value
                found |= dict.fromkeys(record.names, value)
        return found

    def save_pretrained(
        self, folder: str | Path, *, max_shard_size: int | str | None = None, dtype: torch.dtype | None = None
    ) -> Path:
        """Write the folder that `from_pretrained`, transformers' and ours, loads bit for bit: weights, index, configs.

        All ranks write, each some of the files, and none holds more than one whole tensor at a time. The folder appears when
        all of it is on disk, or its files take the place of earlier ones; what else lies there stays as it is.
        `max_shard_size` ("5GB") is the size of a file; without it there is one for each rank, of 64 MiB to 5 GB.
        Of a model with LoRA adapters it is the folder that peft loads: the adapters and their config alone.
        """
        from colonnade.checkpoint.full_weights import save_pretrained

        with self.context.waits.together("engine.save_pretrained()"):
            self.wait_for_weights()
            # Asked of all: some stages of a pipeline may have nothing of it (no adapters, say).
            homes = gather_from_all(own_format_of(self.model), self.context)
            own_format = next((home for home in homes if home is not None), None)
            if own_format is not None:
                return family(own_format).export(self.model, folder, self.context, dtype)
            return save_pretrained(self.model, folder, self.context, max_shard_size, dtype)

    def wait_for_weights(self) -> None:
        """Every parameter is whole when this returns: with ZeRO's `gather_ahead` slices of the last step may be on their way."""
        self.engine_optimizer.wait()


# --- Losses over uneven data ---


_NUMBERS = struct.Struct("2d")
_LEAST = 1e-300
"""A count is 0 or above this; the bits of a whole number of 8 bytes, read as a float, make a number below it."""


class LossBook:
    """The counts of the losses of one step, and the factor on the summed gradients that they make.

    Plain means stay plain means and need no factor and no collective: their gradients are divided by `distinct_data` in the sums
    and by `accumulation` in backward. A loss given as (sum, count) is divided once, by the count of all ranks and passes: then the
    factor is distinct_data / count. Where ranks have uneven numbers of batches means are counted too: the factor is
    distinct_data x accumulation / number of means.
    """

    def __init__(self, context: ParallelContext, accumulation: int) -> None:
        self._context = context
        self._accumulation = accumulation
        self._form = LossForm()
        self._watch = MeanWatch()
        self._divided = DivisionWatch({"gradient_accumulation": accumulation}, ranks=[0])
        # One pass on one rank: its mean is the mean over the batch, whatever it leaves out.
        self._one_mean = accumulation == 1 and context.layout.distinct_data == 1
        self._count: Tensor | float = 0.0
        self._means = 0
        self._totals: Tensor | None = None
        self._carried = False
        # After a first count this rank takes part in every step: were it to leave out a step in which it gives a mean, ranks
        # that give counts would wait for it.
        self._joins = False
        self.uneven = False
        """Set while ranks may run out of batches: then even plain means are counted, by all ranks."""
        # Ranks that see the same data report the same count; each reports its share of it.
        self._share = 1.0
        for axis in context.layout.axes:
            if axis.data == "same" and axis.mode is not ParallelMode.PIPELINE:
                self._share /= axis.size

    def read(self, loss: Any) -> tuple[Tensor, Count | None, Count | None]:
        """(tensor to go backward from, its count or None for a mean, what it is a mean over if that is known)."""
        self._joins = self._joins or isinstance(loss, (tuple, list))  # also with a wrong count, which is refused below
        self._divided.look(loss)
        value, count = split_loss(loss)
        if isinstance(loss, Tensor) and (self._one_mean or count is None):
            if not self._one_mean:
                self._watch.look(loss)
            return loss, None, count
        return value, count, count

    def add(self, count: Count | None, *, here: bool = True) -> None:
        """Note one pass; all of a step are plain means, or all are (sum, count).

        `here`: this rank reports it; of the ranks of a pipeline only one does, and all say which form it has.
        """
        # First of all: the form may be refused below, and the others wait for the counts of this rank all the same.
        self._joins = self._joins or count is not None
        self._form.keep(count is not None)
        if not here:
            return
        if count is None:
            self._means += 1
        else:
            number = count_on(count, self._context.device)
            # A negative count could hide in the sum of all ranks: NaN cannot, and drops the step.
            self._count = self._count + torch.where(number < 0, torch.nan, number)

    @property
    def counted(self) -> bool | None:
        """Whether the losses of this step are (sum, count); None before the first."""
        return self._form.counted

    def carry(self, synchroniser: Synchroniser, scaler: LossScaler | None = None) -> None:
        """Before the last pass of a step, whose count is known by now: send the counts with the gradients, if a bucket can.

        `scaler`: of fp16, by whose `count` sums were divided; it learns the count of the step.
        """
        if self.takes_part:
            self._carried = synchroniser.carry(self._numbers(), lambda totals: self.factor(totals, scaler))

    def scale(self, sync: GradientSync, scaler: LossScaler | None = None) -> Tensor | None:
        """After the last pass: what gradients must be multiplied by; None for nothing, or if `carry` has seen to it.

        Collective over the world where this rank takes part.
        """
        if self._carried or not self.takes_part:
            return None
        mine, world = self._numbers(), sync.world
        with self._context.waits.during("adding up the counts of the losses"):
            if world is None:
                dist.all_reduce(mine, group=self._context.get_group(ParallelMode.GLOBAL))
                return self.factor(mine, scaler)
            # Between ranks of one host sockets take a tenth of the time of a collective. On the same sockets a rank that gave
            # a mean sends the number of its step already, to sum gradients: as a count that is far too small to be one.
            numbers = [_NUMBERS.unpack(each) for each in world.exchange(_NUMBERS.pack(*mine.tolist()))]
            others = [rank for rank, (count, _) in zip(world.ranks, numbers, strict=True) if 0 < count < _LEAST]
            if others:
                raise GradientError(
                    f"rank {listed(others)} gave a mean, others their loss as (sum, count); {USE_ONE_FORM}", code="C045"
                )
            return self.factor(torch.tensor(numbers, dtype=torch.float64, device="cpu").sum(0), scaler)

    @property
    def takes_part(self) -> bool:
        """Whether this rank sends the counts of its losses of this step to the others."""
        return self._joins or self.uneven

    def _numbers(self) -> Tensor:
        """(count, number of means) of this rank."""
        device = self._context.device
        return torch.stack([count_on(value, device) for value in (self._count, self._means)]) * self._share

    def factor(self, totals: Tensor, scaler: LossScaler | None = None) -> Tensor:
        """The factor on this step's summed gradients, made of the sums of all ranks' numbers. Nothing here waits for a device."""
        self._totals = totals
        counted, means = totals.unbind()
        divided = counted if scaler is None else counted / scaler.count
        divisor = torch.where(counted == 0, means / self._accumulation, divided)
        divisor = torch.where((counted > 0) & (means > 0), torch.nan, divisor)
        # With nothing counted anywhere every gradient is zero and stays zero. A wrong count makes the factor NaN.
        divisor = torch.where(divisor == 0, 1.0, divisor.where(divisor.isfinite(), torch.nan))
        if scaler is not None:
            expected = counted / self._context.layout.distinct_data
            scaler.expect(torch.where(means > 0, scaler.count, expected))
        return self._context.layout.distinct_data / divisor

    def refuse_two_forms(self) -> None:
        """Raise where some ranks gave counts and others means. On a device only those that gave means wait to see it."""
        totals, self._totals = self._totals, None
        if totals is None or (totals.device.type != "cpu" and self._form.counted is not False):
            return
        if bool((totals > 0).all()):
            raise GradientError(
                f"some ranks gave their loss as (sum, count), others as a mean; {USE_ONE_FORM}", code="C045"
            )

    def any_rank_has_batch(self, batch_here: bool) -> bool:
        """Whether any rank has a batch left. Collective over the world."""
        flag = torch.tensor([float(batch_here)], device=self._context.device)
        with self._context.waits.during("asking who has a batch"):
            dist.all_reduce(flag, group=self._context.get_group(ParallelMode.GLOBAL))
            return bool(flag.item())

    def clear(self) -> None:
        """Forget the counts of this step."""
        self._form, self._count, self._means, self._carried = LossForm(), 0.0, 0, False


# --- Observers of steps ---


ON_ENGINE = "COLONNADE_ON_ENGINE"
"""If set in the environment, a function `module:name` that is called with every new engine, on every rank."""


def announce(engine: Any) -> None:
    """Call the function that the environment names."""
    if ON_ENGINE in os.environ:
        module, _, name = os.environ[ON_ENGINE].partition(":")
        getattr(importlib.import_module(module), name)(engine)


class Observer:
    """Base class of objects in `engine.observers`, whose methods are called at each step; override those of interest.

    Without observers nothing is computed, kept or sent for them.
    """

    def on_loss(self, loss: Any) -> None:
        """A pass has this loss (a mean, or (sum, count)); its backward pass comes next, or has been with a pipeline."""

    def on_reduced(self, scale: float | Tensor | None) -> None:
        """All handlers have run: gradients are final and not clipped. `scale` is what sums were multiplied by, at the end."""

    def on_stepped(self) -> None:
        """The optimizer has stepped."""


class Observers(list[Observer]):
    """The observers of one engine, called in order."""

    def loss(self, loss: Any) -> None:
        for each in self:
            each.on_loss(loss)

    def reduced(self, scale: float | Tensor | None) -> None:
        for each in self:
            each.on_reduced(scale)

    def stepped(self) -> None:
        for each in self:
            each.on_stepped()


_NO_BATCH = object()


class Engine(LastStep, WholeWeights):
    """Runs training steps: `zero_grad`, call, `criterion`, `backward`, `step`.

    With `accumulation=k` the gradients of k backward passes make one step: `zero_grad` and `step` act on the
    first and the last of them, so the loop is written the same way for any k. Built by `colonnade.initialize`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        criterion: Any = None,
        *,
        context: ParallelContext,
        sync: GradientSync,
        stepper: Stepper,
        schedule: BaseSchedule,
        accumulation: int,
        precision: Precision,
        own_loss: TrainingLoss | None = None,
    ) -> None:
        self._model, self._optimizer, self._criterion = model, optimizer, criterion
        self._forward = own_loss.run if own_loss is not None and criterion is None else model
        self.own_loss = own_loss  # that of a model of transformers, where the user has given no criterion
        self._schedule, self._sync, self._stepper = schedule, sync, stepper
        self._precision, self._book = precision, LossBook(context, accumulation)
        self.same_batch = SameBatch(context)  # in some steps, ranks that see the same data compare what they were given
        self.observers = Observers()  # are told of every pass and step
        stepped_on = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self._not_stepped_on = [parameter for parameter in model.parameters() if id(parameter) not in stepped_on]
        self._passes, self._total_passes, self._failed = 0, 0, False
        self._watch = LoopWatch(model, optimizer, context, sync)
        self.context, self.accumulation, self.training = context, accumulation, True
        self.loss_count: Count | None = None
        """What the loss of the last pass is a mean over, where it was given as (sum, count) and this rank knows."""
        self.gives_loss = criterion is not None or own_loss is not None  # or the model has been trained on its own
        schedule.pre_processing(self)
        context.waits.end_step()

    # -- the loop -----------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward pass. One that makes its own loss takes a batch as one argument too: engine(batch).

        In a pipeline this is the forward pass of this rank's stage, on activations; `execute_schedule` takes batches.
        """
        if self.context.pipeline_parallel_size == 1:
            self.same_batch.see((args, kwargs))
        else:
            refuse_batch(self._model, args, kwargs)
        with self.context.waits.during("in the forward pass", "forward"):
            return self._forward(*args, **kwargs)

    def zero_grad(self) -> None:
        """Clear the gradients, at the start of a step only. After a backward pass that failed, it gives the step up: all
        ranks drop it, and go on with the next; where some would not hear of that, as they sum nothing with us, it raises.
        """
        if self._failed:
            self._give_up_step()
        if self._passes == 0:
            self._stepper.report_skips(wait=False)
            self._optimizer.zero_grad(set_to_none=True)
            for parameter in self._not_stepped_on:
                parameter.grad = None

    def backward(self, loss: Any) -> None:
        """Backward from a scalar loss (a mean), or from (sum, count); the last pass of a step synchronises.

        A mean that torch's cross-entropy or ours has made counts as (sum, count): it may leave out labels.
        """
        self._check_not_failed()
        # A loss of a wrong form, or one call too many, is an error of this rank alone; the other ranks would wait for its sums.
        with self._raise_on_all_ranks():
            value, count, self.loss_count = self._book.read(loss)
            self._book.add(count)
            self._begin_pass()
        self.observers.loss(loss)
        # A mean is divided by the number of passes here. A sum is divided by the count of all passes and ranks, which is known
        # only when the gradients are summed.
        with self._watched_pass():
            (value * (self.loss_scale if count is None else self.sum_scale)).backward()

    @contextmanager
    def _watched_pass(self) -> Iterator[None]:
        """A backward pass. After an error its gradients are not whole: the step is given up, by the next `zero_grad`."""
        try:
            with self.context.waits.during("in the backward pass", "backward"):
                yield
        except BaseException as error:
            self._failed = True
            if "out of bounds for storage of size 0" in str(error):
                error.add_note(
                    "zero stage 3 gives gathered weights back when they have been used, and a graph that goes through them twice "
                    "(torch.autograd.grad with create_graph=True) finds them gone; use zero stage 2."
                )
            raise
        self._sync.synchroniser.end_backward()

    def _begin_pass(self) -> None:
        """Count a pass and have gradients collected; in the last one of a step they are sent while backward runs."""
        self._count_pass()
        self._sync.prepare(last := self._passes == self.accumulation)
        if last:
            self._book.carry(self._sync.synchroniser, self._stepper.scaler)

    def _count_pass(self) -> None:
        """Count one pass of a step; `unsummed` refuses `optimizer.step()` until `step` has summed the gradients."""
        if self._passes == self.accumulation:
            raise GradientError(
                f"backward() was called {self._passes + 1} times for one step, which has {self.accumulation}; call "
                f"step() after each, add up losses that belong together, or set gradient_accumulation in the config",
                code="C046",
            )
        self._passes += 1
        self._total_passes += 1
        self._watch.unsummed = True

    def backward_by_grad(self, tensor: Tensor, grad: Tensor) -> None:
        """Backward from a tensor whose gradient is known, as at a pipeline stage."""
        self._check_not_failed()
        self._begin_pass()
        with self._watched_pass():
            tensor.backward(grad)

    def backward_micro_batch(
        self, tensors: Sequence[Any], grads: Sequence[Tensor], *, inputs: Sequence[Tensor] | None, last: bool
    ) -> None:
        """One of the backward passes of a schedule that runs them itself; the whole schedule is one pass."""
        self._sync.prepare(last and self._passes + 1 == self.accumulation)
        torch.autograd.backward(tensors, grads, retain_graph=inputs is not None, inputs=inputs)

    def note_loss(self, count: Count | None, here: bool = True, *, trains: bool = True) -> None:
        """Take the count of a loss given as (sum, count), or None for a mean, from a schedule that does not call `backward`: one
        that runs its backward passes itself, or with `trains=False` only forward. `here`: this rank of a pipeline reports it."""
        self.loss_count = count
        if trains:
            self._book.add(count, here=here)

    def step(self) -> bool:
        """Reduce, clip and step, if this was the last pass of the step; returns whether it was."""
        # An error in the order of the calls is this rank's own, so the others must be told: they would wait for its sums.
        if self._passes == 0:
            with self._raise_on_all_ranks():
                raise GradientError(
                    "step() before backward(): there are no gradients to apply. Write engine.backward(loss), not "
                    "loss.backward(): that one sums nothing over the ranks",
                    code="C046",
                )
        self._check_not_failed()
        if self._passes < self.accumulation:
            return False
        self._finish_step(self._sum_gradients())
        return True

    def _sum_gradients(self) -> StepOutcome:
        """The first half of a step, the same on all ranks, also on one that gives the step up and has no gradients: check, sum,
        learn whether the step is dropped. Gradients are final and not clipped afterwards."""
        gave_up = self._failed

        # Ranks that see the same data compare what they were given, before sums mix gradients of different batches.
        self.same_batch.end_step(self._book.counted, whole=not gave_up)

        # Sum gradients. Sums of losses are divided by the count of all ranks, which no rank knew when it went backward: it was
        # sent with the first bucket, or is added up here, and is a factor on the summed gradients.
        scale = self._book.scale(self._sync, self._stepper.scaler)
        with self.context.waits.during("summing the gradients", "communication"):
            outcome = self._sync.finish(scale, counts=self._book.takes_part)

        # A rank that gave the step up with a reason has raised an error, which all ranks raise: the mistake of one is likely
        # to be that of all, and no rank goes on alone. Without a reason (a failed backward pass) the step is dropped.
        if outcome.reasons:
            first = next(iter(outcome.reasons.values()))
            self._watch.unsummed = False
            self._stepper.note_failed(outcome.failed_ranks)
            self._forget_passes()
            raise error_of(
                first, [one for one, why in outcome.reasons.items() if why == first], self.context.get_global_rank()
            )
        self._book.refuse_two_forms()
        self.observers.reduced(outcome.scale)
        self._watch.end_sums(complete=not gave_up)
        self._stepper.note_failed(outcome.failed_ranks)
        return outcome

    def _finish_step(self, outcome: StepOutcome) -> None:
        """The second half of a step: norm, clipping, optimizer, scale of fp16, observers.

        Where ranks do not agree on the host (NCCL), nobody knows yet whether a rank has given up, and all step: the flag of the
        world drops it on the device.
        """
        try:
            if not outcome.failed_ranks:
                self._stepper.step(outcome)
                if not self._failed:
                    self.observers.stepped()
        except BaseException:
            # Of a norm that is not finite, say. The loop may catch it: then the next step begins as any other.
            self._forget_passes()
            raise
        self._end_step()

    def _end_step(self) -> None:
        """Count from the start, look at the whole step, and tell ranks that wait that this one has ended it."""
        self._forget_passes()
        self._watch.end_step()
        self.context.waits.end_step()

    def _forget_passes(self) -> None:
        self._passes, self._failed = 0, False
        self._book.clear()

    # -- a step that one rank gives up ------------------------------------------------------------------------

    def _check_not_failed(self) -> None:
        if self._failed:
            raise GradientError(
                "the last backward pass of this step failed, so its gradients are not whole; call engine.zero_grad(), which "
                "gives the step up (the other ranks drop it too), and go on with the next batch",
                code="C046",
            )

    @contextmanager
    def _raise_on_all_ranks(self) -> Iterator[None]:
        """Around calls whose error may be this rank's alone: it gives the step up with the error, and all ranks raise it."""
        try:
            yield
        except GradientError as error:
            if self.context.world_size > 1 and not self._ranks_without_common_sum():
                get_dist_logger().error(f"rank {self.context.get_global_rank()} gives this step up: {error}")
                with suppress(GradientError):
                    self._give_up_step(note_of(error))
            raise

    def _ranks_without_common_sum(self) -> list[int]:
        """The ranks with which this one sums no gradient: they could not learn that it gives a step up."""
        return sorted(set(range(self.context.world_size)).difference(*self._sync.synchroniser.groups))

    def _give_up_step(self, why: str = "") -> None:
        """Have all ranks drop this step, and raise an error if it was given up with a reason (`why`).

        The other ranks are on their way to the end of the step and wait for this one there. So it takes part in the rest of the
        step without gradients, with the same messages and collectives at the same places, and its notes say that it failed.
        """
        others = self._ranks_without_common_sum()
        if others:
            raise GradientError(
                f"backward failed on this rank, and no gradient is summed with ranks {listed(others)}, so ranks "
                f"{listed(others)} would not hear of it and would step; end the run, and resume from a checkpoint",
                code="C046",
            )
        # Gradients of a pass that failed are not whole; zeros are sent in their place.
        self._failed = True
        for parameter in self._model.parameters():
            parameter.grad = None
        # The passes that the others still make: each with the sums that are due at its end (ZeRO 2 sums at every pass), and in a
        # loop over `batches` with the question for a batch. They are none of this rank's, so they are not counted in the total.
        total = self._total_passes
        while self._passes < self.accumulation:
            self._sync.synchroniser.end_backward()
            if self._book.uneven:
                self._book.any_rank_has_batch(True)
            self._begin_pass()
        self._total_passes = total
        # The end of the last backward pass, and the step.
        self._sync.synchroniser.fail(why)
        self._sync.synchroniser.end_backward()
        self._finish_step(self._sum_gradients())

    # -- modes, schedules, uneven loaders ---------------------------------------------------------------------

    def train(self, mode: bool = True) -> None:
        """Put the model into training mode, or with False into evaluation mode."""
        self.training = self.same_batch.training = mode
        self._model.train(mode)

    def eval(self) -> None:
        """Put the model into evaluation mode."""
        self.train(False)

    def execute_schedule(self, data_iter: Iterator[Any], **kwargs: Any) -> StepResult:
        """Run one step's passes by the schedule; returns (output, label, loss)."""
        before = self._total_passes
        self.loss_count = None
        with self.context.waits.during("in the passes of the schedule", "forward"):
            result = checked_result(self._schedule, self._schedule.forward_back_step(self, data_iter, **kwargs))
        if not kwargs.get("forward_only", False):
            self.gives_loss = True
            # No pass was counted by `backward`: a pipeline runs its backward passes itself, and the whole schedule is one pass.
            if self._total_passes == before:
                if not self._schedule.runs_backward:
                    raise ScheduleError(
                        f"{type(self._schedule).__name__}.forward_back_step() returned without engine.backward(loss): this batch "
                        f"would not be learnt from. Call engine.backward, or pass forward_only=True to evaluate."
                    )
                self._count_pass()
                if self._passes == self.accumulation:
                    # Where no backward pass was `last` (several chunks, or none that reached a parameter), sums start here.
                    self._sync.prepare(last=True)
                self.observers.loss(result[2])
        return result

    def batches(self, loader: Iterable[Any], after_step: Callable[[], Any] | None = None) -> Iterator[Any]:
        """The batches of `loader`, for loaders that are not equally long on all ranks.

        A rank that has run out goes on taking part in the others' steps, inside this loop, with no weight in
        the mean; `after_step` (an LR scheduler's step, say) is called after each of those. The body of the
        loop must call `backward` and `step` once for every batch.
        """
        if self.gathers_weights:
            raise GradientError(
                "engine.batches() cannot let a rank run out of batches while FSDP2 (zero stage 3) gathers parameters in "
                "every forward pass: give all ranks equally many batches and loop over the loader itself, or use stage 2",
                code="C046",
            )
        iterator = iter(loader)
        self._book.uneven = True
        try:
            while True:
                batch = next(iterator, _NO_BATCH)
                if not self._book.any_rank_has_batch(batch is not _NO_BATCH):
                    break
                if batch is _NO_BATCH:
                    self._pass_without_batch(after_step)
                else:
                    before = self._total_passes
                    yield batch
                    if self._failed:
                        self._give_up_step()
                    passes = self._total_passes - before
                    if passes != 1 or self._passes == self.accumulation:
                        raise GradientError(
                            f"the body of a loop over engine.batches() called backward() {passes} times and left "
                            f"{self._passes} of {self.accumulation} passes; call backward() and step() once for every batch, or the "
                            f"ranks lose count of each other",
                            code="C046",
                        )
            while self._passes:
                self._pass_without_batch(after_step)
        finally:
            self._book.uneven = False

    def _pass_without_batch(self, after_step: Callable[[], Any] | None) -> None:
        """Take part in a pass of the other ranks, without gradients: they count as zero, with no weight in the mean."""
        self.zero_grad()
        self._begin_pass()
        self._sync.synchroniser.end_backward()
        if self.step() and after_step is not None:
            after_step()

    @property
    def gathers_weights(self) -> bool:
        """Whether the ranks gather weights of each other in every forward pass (zero stage 3), so that none may leave one out."""
        return any(hasattr(module, "unshard") for module in self._model.modules())

    def ledger(self) -> Ledger:
        """Which reduction each parameter owes and which handler does it."""
        return self._sync.ledger

    def precision_table(self) -> PrecisionTable:
        """What lies in which dtype, and how many bytes per parameter this rank has of it."""
        return precision_table(self._model, self.engine_optimizer, self._sync.synchroniser, self._precision.dtype)

    def memory(self, reset: bool = False) -> MemoryTable:
        """What this rank's memory is for, now and at its peak; `reset`: the next peak is one from now on."""
        sizes, device = self.precision_table(), self.context.device
        return memory_table(self._model, self.engine_optimizer, self._sync.synchroniser, sizes, device, reset)

    def close(self) -> None:
        """Remove hooks and give back shared memory; the model stays usable without the engine."""
        self._watch.close()
        self._stepper.close()
        self._sync.close()
        self._precision.undo(self._model, self._criterion)

    # -- scales and state ---------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float | Tensor:
        """What a mean loss is multiplied by before its backward pass: 1/accumulation, and the scale of fp16."""
        scaler = self._stepper.scaler
        return (scaler.scale if scaler is not None else 1.0) / self.accumulation

    @property
    def sum_scale(self) -> float | Tensor:
        """What a loss given as (sum, count) is multiplied by before its backward pass: the scale of fp16, and 1/count."""
        scaler = self._stepper.scaler
        return scaler.scale / scaler.count if scaler is not None else 1.0

    def extra_state(self) -> dict[str, Any]:
        """What a checkpoint saves as `extra` beside model and optimizer: the history of a clip method, and the loss scale."""
        return self._stepper.extra_state()

    def load_extra_state(self, extra: Mapping[str, Any]) -> None:
        """Take up what `extra_state` gave; other keys are passed over."""
        self._stepper.load_extra_state(extra)

    # -- parts --------------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        return self._model

    @property
    def optimizer(self) -> Any:
        return self._optimizer

    @property
    def engine_optimizer(self) -> EngineOptimizer:
        """The optimizer as the engine drives it: slices of gradients, state, and weights on their way."""
        return self._stepper.optimizer

    @property
    def criterion(self) -> Any:
        return self._criterion

    @property
    def schedule(self) -> BaseSchedule:
        return self._schedule

    @schedule.setter
    def schedule(self, schedule: BaseSchedule) -> None:
        schedule.pre_processing(self)
        self._schedule = schedule

    @property
    def uses_pipeline(self) -> bool:
        """Whether the model is split over pipeline stages."""
        return self.context.pipeline_parallel_size > 1

    @property
    def gradient_handlers(self) -> list[Any]:
        """The handlers in the order they run."""
        return list(self._sync.handlers)

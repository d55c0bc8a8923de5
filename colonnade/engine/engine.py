"""The engine: model, optimizer and loss behind the four calls of a training loop.

`Engine.backward` and `Engine.step` run a training step. `step` consists of two halves, the methods below it: reduction and update.
`LossBook` computes the gradient factor for losses over uneven data, `Observer` is the base class of step callbacks. `LastStep` and
`WholeWeights` are the read-only parts of `Engine`: queries about the last step, and export of the unsharded weights.
"""

from __future__ import annotations

import copy
import importlib
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colonnade.comm.messages import HostCopy, error_of, gather_from_all, note_of
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.checks import LoopWatch, SameBatch, refuse_batch
from colonnade.engine.gradient_sync import GradientSync
from colonnade.engine.memory import MemoryTable, memory_table
from colonnade.engine.model import TrainingLoss, family, own_format_of
from colonnade.engine.precision import LossScaler, Precision, PrecisionTable, precision_table
from colonnade.engine.schedule.loss import Count, DivisionWatch, LossForm, MeanWatch, count_on, split_loss
from colonnade.engine.schedule.schedules import BaseSchedule, StepResult, checked_result
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
    """The methods of `Engine` that return facts of the last step: norms, clipping, and whether the step was skipped."""

    _stepper: Stepper
    _failed: bool

    @property
    def grad_norm(self) -> Tensor | None:
        """The gradient norm of the last step before clipping, as a device tensor; None if clipping is off."""
        return self._stepper.last.norm if self._stepper.last is not None else None

    def grad_norms(self) -> dict[str, Tensor]:
        """The norms of the last step by clip group, layer or parameter, as device tensors; computed by the same collective as
        `grad_norm`."""
        return self._stepper.norms()

    @property
    def skipped_steps(self) -> int:
        """Number of steps skipped for a non-finite gradient or a spike. Waits for the flag of the last step."""
        self._stepper.report_skips(wait=True)
        return self._stepper.skips.total

    @property
    def last_step_skipped(self) -> bool:
        """Whether the last step was skipped. Waits until its norm is computed."""
        self._stepper.report_skips(wait=True)
        return self._stepper.skips.last

    @property
    def clip_divisor(self) -> Tensor | None:
        """The largest number by which clipping divided gradients in the last step: 1 if nothing was clipped; None if clipping
        is off."""
        return self._stepper.last.divisor.amax() if self._stepper.last is not None else None

    @property
    def last_skip_flag(self) -> HostCopy | None:
        """The skip flag of the last step (1 if it was skipped), which is being copied to the host; None before the first step."""
        return HostCopy(torch.ones((), device="cpu")) if self._failed else self._stepper.skips.flag

    @property
    def may_skip(self) -> bool:
        """Whether steps can be skipped at all, because of a non-finite gradient or a spike."""
        return self._stepper.policy is not None


# --- Unsharded weights ---


class WholeWeights:
    """The methods of `Engine` that export unsharded weights: as a state dict, a safetensors file, or a transformers folder.

    Collective.
    """

    context: ParallelContext

    @property
    def model(self) -> nn.Module:
        raise NotImplementedError

    @property
    def engine_optimizer(self) -> EngineOptimizer:
        raise NotImplementedError

    def full_state_dict(self, to: str | Path = "all", *, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Return the unsharded weights and persistent buffers, on the CPU, under any layout; a tied weight under each of its names.

        The result fits `load_state_dict` of a plain model, unless its modules have extra state. Collective over the world.

        Args:
            to: "all" returns the tensors on every rank, "first" only on rank 0 (elsewhere the dict is empty). Any other
                text is the safetensors file to write, one tensor at a time; the dict is then empty everywhere.
            dtype: the dtype to which floating point tensors are cast; by default they keep their dtype.

        Raises:
            CheckpointError: `to` is neither "all" nor "first" nor the name of a .safetensors file.
        """
        to_file = to not in ("all", "first")
        if to_file and local_path(to, "the file of engine.full_state_dict()", CheckpointError).suffix != ".safetensors":
            raise CheckpointError(f"to is {str(to)!r}; pass 'all', 'first' or the name of a .safetensors file to write")
        # Imported here, so that a run without an export does not load the checkpoint code.
        from colonnade.checkpoint.full_weights import FullTensors, save_full

        with self.context.waits.together("engine.full_state_dict()"):
            self.wait_for_weights()
            full = FullTensors(self.model, self.context)
            if to_file:
                save_full(full, to, self.context, dtype)
                return {}
            state: dict[str, Tensor] = {}
            for record in full.records:
                value = full.gather(record) if to == "all" else full.gather_to_ranks([(record, 0)])
                if value is not None:
                    value = value.to(dtype) if dtype is not None and value.is_floating_point() else value
                    state |= dict.fromkeys(record.names, value)
            return state

    def save_pretrained(
        self, folder: str | Path, *, max_shard_size: int | str | None = None, dtype: torch.dtype | None = None
    ) -> Path:
        """Write weights, index and configs to a folder that `from_pretrained` of transformers (or `colonnade.from_pretrained`)
        loads bit for bit.

        Every rank writes some of the files and holds at most one unsharded tensor at a time. A new folder appears once it is
        complete on disk. In an existing folder, earlier weight files are replaced and other files are kept. For a model with
        LoRA adapters, the folder is in the format of peft: only the adapters and their config. Collective over the world.

        Args:
            folder: the folder to write.
            max_shard_size: the largest size of a file, such as "5GB"; by default one file per rank, of 64 MiB to 5 GB.
            dtype: the dtype to which floating point tensors are cast; by default they keep their dtype.
        """
        from colonnade.checkpoint.full_weights import save_pretrained

        with self.context.waits.together("engine.save_pretrained()"):
            self.wait_for_weights()
            # All ranks must take the same branch, but a pipeline stage may have no module of the family (no adapters, say).
            homes = gather_from_all(own_format_of(self.model), self.context)
            own_format = next((home for home in homes if home is not None), None)
            if own_format is not None:
                return family(own_format).export(self.model, folder, self.context, dtype)
            return save_pretrained(self.model, folder, self.context, max_shard_size, dtype)

    def wait_for_weights(self) -> None:
        """Wait until every parameter has the values of the last step. (With ZeRO's `gather_ahead`, all-gathers may still be
        running.)"""
        self.engine_optimizer.wait()


# --- Losses over uneven data ---


_NUMBERS = struct.Struct("2d")
_LEAST = 1e-300
"""A count is 0 or above this. A step number is sent as an 8-byte integer, whose bits make a float below this."""


class LossBook:
    """Collects the loss counts of one step, and computes the factor on the reduced gradients from them.

    Plain means need neither a factor nor a collective: their gradients are divided by `distinct_data` in the all-reduce and by
    `accumulation` in backward. A loss given as (sum, count) is divided once, by the count of all ranks and micro-steps: the
    factor is distinct_data / count. If ranks have different numbers of batches, means are counted too: the factor is
    distinct_data x accumulation / number of means.
    """

    def __init__(self, context: ParallelContext, accumulation: int) -> None:
        self._context = context
        self._accumulation = accumulation
        self._form = LossForm()
        self._watch = MeanWatch()
        self._divided = DivisionWatch({"gradient_accumulation": accumulation}, ranks=[0])
        # With one micro-step and one data rank the mean is the mean over the batch, whatever labels it ignores.
        self._one_mean = accumulation == 1 and context.layout.distinct_data == 1
        self._count: Tensor | float = 0.0
        self._means = 0
        self._totals: Tensor | None = None
        self._carried = False
        # After its first count this rank joins the collective of every step. If it left out a step in which it has a mean, ranks
        # with counts would wait for it forever.
        self._joins = False
        self.uneven = False
        """Set while ranks may run out of batches: then even plain means are counted, by all ranks."""
        # Ranks that see the same data have the same count. Each reports its fraction, so that the sum over the world is right.
        self._fraction = 1.0
        for axis in context.layout.axes:
            if axis.data == "same" and axis.mode is not ParallelMode.PIPELINE:
                self._fraction /= axis.size

    def read(self, loss: Any) -> tuple[Tensor, Count | None, Count | None]:
        """Split a loss into (the tensor on which to call backward, its count or None for a mean, the number of labels of a
        mean or None)."""
        self._joins = self._joins or isinstance(loss, (tuple, list))  # even if the count is invalid and raises below
        self._divided.look(loss)
        value, count = split_loss(loss)
        if isinstance(loss, Tensor) and (self._one_mean or count is None):
            if not self._one_mean:
                self._watch.look(loss)
            return loss, None, count
        return value, count, count

    def add(self, count: Count | None, *, here: bool = True) -> None:
        """Add the loss of one micro-step. All losses of a step are plain means, or all are (sum, count).

        `here`: whether this rank reports the count. In a pipeline only one rank reports it; the others record only the form of
        the loss.
        """
        # Before anything can raise: the other ranks wait for this rank's count even if its form is refused below.
        self._joins = self._joins or count is not None
        self._form.keep(count is not None)
        if not here:
            return
        if count is None:
            self._means += 1
        else:
            number = count_on(count, self._context.device)
            # A negative count could vanish in the sum over the ranks. NaN cannot, and skips the step.
            self._count = self._count + torch.where(number < 0, torch.nan, number)

    @property
    def counted(self) -> bool | None:
        """Whether the losses of this step are given as (sum, count); None before the first loss."""
        return self._form.counted

    def carry(self, synchroniser: Synchroniser, scaler: LossScaler | None = None) -> None:
        """Send the counts with the gradients, if a bucket can carry them. Called before the last backward pass of a step.

        `scaler`: the fp16 scaler. Loss sums were divided by its `count`; it receives the count of this step.
        """
        if self.takes_part:
            self._carried = synchroniser.carry(self._numbers(), lambda totals: self.factor(totals, scaler))

    def scale(self, sync: GradientSync, scaler: LossScaler | None = None) -> Tensor | None:
        """The factor on the reduced gradients, after the last pass; None if the factor is 1, or if `carry` has sent the counts.

        Collective over the world if `takes_part`.
        """
        if self._carried or not self.takes_part:
            return None
        local, world = self._numbers(), sync.world
        with self._context.waits.during("adding up the counts of the losses"):
            if world is None:
                if self._context.world_size > 1:
                    dist.all_reduce(local, group=self._context.get_group(ParallelMode.GLOBAL))
                return self.factor(local, scaler)
            # Between ranks of one host, sockets take a tenth of the time of a collective. A rank whose loss was a mean does not
            # come here: it sends the number of its step on the same sockets, to reduce gradients. Read as a float, that
            # number is far too small to be a count, which is how the two are told apart.
            numbers = [_NUMBERS.unpack(received) for received in world.exchange(_NUMBERS.pack(*local.tolist()))]
            means = [rank for rank, (count, _) in zip(world.ranks, numbers, strict=True) if 0 < count < _LEAST]
            if means:
                raise GradientError(
                    f"rank {listed(means)} gave the loss as a mean, and other ranks gave it as (sum, count). To "
                    f"correct this, {USE_ONE_FORM}",
                    code="C045",
                )
            return self.factor(torch.tensor(numbers, dtype=torch.float64, device="cpu").sum(0), scaler)

    @property
    def takes_part(self) -> bool:
        """Whether this rank sends its loss counts of this step to the other ranks."""
        return self._joins or self.uneven

    def _numbers(self) -> Tensor:
        """This rank's contribution to (count, number of means)."""
        device = self._context.device
        return torch.stack([count_on(value, device) for value in (self._count, self._means)]) * self._fraction

    def factor(self, totals: Tensor, scaler: LossScaler | None = None) -> Tensor:
        """The factor on the reduced gradients, from the (count, number of means) of the world. Never waits for a device."""
        self._totals = totals
        counted, means = totals.unbind()
        divided = counted if scaler is None else counted / scaler.count
        divisor = torch.where(counted == 0, means / self._accumulation, divided)
        # Both forms in one step have no meaning. NaN skips the step on the device; `refuse_two_forms` raises on the host.
        divisor = torch.where((counted > 0) & (means > 0), torch.nan, divisor)
        # If nothing was counted on any rank, every gradient is zero and stays zero. An invalid count makes the factor NaN.
        divisor = torch.where(divisor == 0, 1.0, divisor.where(divisor.isfinite(), torch.nan))
        if scaler is not None:
            expected = counted / self._context.layout.distinct_data
            scaler.expect(torch.where(means > 0, scaler.count, expected))
        return self._context.layout.distinct_data / divisor

    def refuse_two_forms(self) -> None:
        """Raise if some ranks had (sum, count) losses and others had means.

        On a GPU, only ranks with means wait for the totals.
        """
        totals, self._totals = self._totals, None
        if totals is None or (totals.device.type != "cpu" and self._form.counted is not False):
            return
        if bool((totals > 0).all()):
            raise GradientError(
                "some ranks gave the loss as (sum, count), and other ranks gave it as a mean. To correct this, "
                f"{USE_ONE_FORM}",
                code="C045",
            )

    def any_rank_has_batch(self, batch_here: bool) -> bool:
        """Whether any rank has a batch left. Collective over the world."""
        flag = torch.tensor([float(batch_here)], device=self._context.device)
        with self._context.waits.during("asking which ranks have a batch"):
            dist.all_reduce(flag, group=self._context.get_group(ParallelMode.GLOBAL))
            return bool(flag.item())

    def copy(self) -> LossBook:
        """A copy whose counts are independent."""
        twin = copy.copy(self)
        twin._form = copy.copy(self._form)
        return twin

    def clear(self) -> None:
        """Reset the counts for the next step."""
        self._form, self._count, self._means, self._carried = LossForm(), 0.0, 0, False


# --- Observers of steps ---


ON_ENGINE = "COLONNADE_ON_ENGINE"
"""Environment variable with a function, as `module:name`, that is called with every new engine on every rank."""


def announce(engine: Any) -> None:
    """Call the function named by the environment variable `COLONNADE_ON_ENGINE`, if it is set."""
    if ON_ENGINE in os.environ:
        module, _, name = os.environ[ON_ENGINE].partition(":")
        getattr(importlib.import_module(module), name)(engine)


class Observer:
    """Base class of step callbacks: append an object to `engine.observers` and override the methods of interest.

    Without observers nothing extra is computed, kept or sent.
    """

    def on_loss(self, loss: Any) -> None:
        """Called with each loss (a mean, or (sum, count)): before its backward pass, or after it in a pipeline."""

    def on_reduced(self, scale: float | Tensor | None) -> None:
        """Called when all handlers have run: gradients are final, but not clipped.

        `scale`: the factor that was applied to the reduced gradients.
        """

    def on_stepped(self) -> None:
        """Called after the optimizer has stepped."""


class Observers(list[Observer]):
    """The observers of one engine, called in order."""

    def loss(self, loss: Any) -> None:
        for observer in self:
            observer.on_loss(loss)

    def reduced(self, scale: float | Tensor | None) -> None:
        for observer in self:
            observer.on_reduced(scale)

    def stepped(self) -> None:
        for observer in self:
            observer.on_stepped()


_NO_BATCH = object()


@dataclass
class TracedPass:
    """The counts of a pass in `Engine.pass_without_trace`: the count of a (sum, count) loss, and the number of labels of the loss."""

    count: Count | None = None
    loss_count: Count | None = None


class Engine(LastStep, WholeWeights):
    """Runs training steps: `zero_grad`, call, `criterion`, `backward`, `step`. Built by `colonnade.initialize`.

    With `accumulation=k` the gradients of k micro-steps make one step: `zero_grad` acts on the first and `step` on the last
    of them, so the loop is the same for any k. All ranks call these methods in the same order, the same number of times.
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
        self.own_loss = own_loss
        """The loss of a transformers model, if the user has given no criterion."""
        self._schedule, self._sync, self._stepper = schedule, sync, stepper
        self._precision, self._book = precision, LossBook(context, accumulation)
        self.same_batch = SameBatch(context)
        self.observers = Observers()
        """Objects whose methods are called at each loss, reduction and step: append an `Observer`."""
        # Parameters that the optimizer does not have, and whose gradients its zero_grad() does not clear.
        stepped_on = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self._not_stepped_on = [parameter for parameter in model.parameters() if id(parameter) not in stepped_on]
        self._passes, self._total_passes, self._failed = 0, 0, False
        self._traced: TracedPass | None = None
        self._watch = LoopWatch(model, optimizer, context, sync)
        self.context, self.accumulation, self.training = context, accumulation, True
        self.uses_pipeline = context.pipeline_parallel_size > 1
        """Whether the model is split over pipeline stages."""
        self.loss_count: Count | None = None
        """The number of labels that the last loss is a mean over; None if this rank does not know."""
        # Set later by `execute_schedule` too: a model may be trained on a loss that only its schedule computes.
        self.gives_loss = criterion is not None or own_loss is not None
        schedule.pre_processing(self)
        # The engine is built: from here on, the position of this rank is "outside the engine after 0 steps".
        context.waits.end_step()

    # -- the loop -----------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass. A model with its own loss also accepts a batch as a single argument: `engine(batch)`.

        In a pipeline this runs the forward pass of this rank's stage, on activations; pass batches to `execute_schedule`.
        """
        if not self.uses_pipeline:
            self.same_batch.see((args, kwargs))
        else:
            refuse_batch(self._model, args, kwargs)
        with self.context.waits.during("in the forward pass", "forward"):
            return self._forward(*args, **kwargs)

    def zero_grad(self) -> None:
        """Clear the gradients at the start of a step; does nothing in later micro-steps.

        After a failed backward pass this abandons the step on all ranks, so that training continues with the next batch.

        Raises:
            GradientError: a step must be abandoned, but this rank shares no all-reduce with some other rank, and cannot
                inform it.
        """
        if self._failed:
            self._abandon_step()
        if self._passes == 0:
            self._stepper.report_skips(wait=False)
            self._optimizer.zero_grad(set_to_none=True)
            for parameter in self._not_stepped_on:
                parameter.grad = None

    def backward(self, loss: Any) -> None:
        """Run backward from a loss; in the last micro-step of a step, gradients are reduced while it runs.

        Args:
            loss: a scalar that is a mean, or (sum, count). A mean from cross-entropy (of torch, or of this library) is
                treated as (sum, count), since it may ignore some labels.

        Raises:
            GradientError: the loss does not have the form of the earlier losses of the step, or the step is complete
            already.
        """
        self._check_not_failed()
        if not self._schedule.calls_backward:
            raise GradientError(
                "cuda_graph=True records the passes of engine.execute_schedule(iter([batch])); call it in place of engine(...), "
                "criterion and engine.backward(loss), or use cuda_graph='step', which records only clipping and optimizer step",
                code="C071",
            )
        # A loss of the wrong form, or a call too many, is an error of this rank only. The others would wait for its gradients.
        with self._raise_on_all_ranks():
            value, count, self.loss_count = self._book.read(loss)
            self._book.add(count)
            self._begin_pass()
        if self._traced is not None:
            self._traced.count, self._traced.loss_count = count, self.loss_count
        self.observers.loss(loss)
        # A mean is divided by the number of micro-steps here. A sum is divided by the count of all ranks and micro-steps,
        # which is known only when the gradients are reduced.
        with self._watched_pass():
            (value * (self.loss_scale if count is None else self.sum_scale)).backward()

    @contextmanager
    def _watched_pass(self) -> Iterator[None]:
        """A context manager around a backward pass.

        After an error, gradients are incomplete, and the next `zero_grad` abandons the step.
        """
        try:
            with self.context.waits.during("in the backward pass", "backward"):
                yield
        except BaseException as error:
            self._failed = True
            if "out of bounds for storage of size 0" in str(error):
                error.add_note(
                    "ZeRO stage 3 frees gathered weights after their use, so a graph that uses them twice "
                    "(torch.autograd.grad with create_graph=True) fails; use zero stage 2."
                )
            raise
        self._sync.synchroniser.end_backward()

    def _begin_pass(self) -> None:
        """Count a micro-step and prepare the gradient buckets; in the last one they are sent while backward runs."""
        self._count_pass()
        self._sync.prepare(last := self._passes == self.accumulation)
        if last:
            self._book.carry(self._sync.synchroniser, self._stepper.scaler)

    def _count_pass(self) -> None:
        if self._passes == self.accumulation:
            raise GradientError(
                f"backward() was called {self._passes + 1} times in one step, but gradient_accumulation is "
                f"{self.accumulation}. There are three remedies. 1. Call step() after each backward(). 2. Add up the "
                "losses of one batch before backward(). 3. Set gradient_accumulation in the config.",
                code="C046",
            )
        self._passes += 1
        self._total_passes += 1
        # From now on `optimizer.step()` raises, until `step` has reduced the gradients.
        self._watch.unsummed = True

    def backward_by_grad(self, tensor: Tensor, grad: Tensor) -> None:
        """Run backward from a tensor with a given gradient, as at a pipeline stage."""
        self._check_not_failed()
        self._begin_pass()
        with self._watched_pass():
            tensor.backward(grad)

    def backward_micro_batch(
        self, tensors: Sequence[Any], grads: Sequence[Tensor], *, inputs: Sequence[Tensor] | None, last: bool
    ) -> None:
        """Run backward for one micro-batch of a schedule that runs its backward passes itself.

        All its micro-batches together are one micro-step.
        """
        self._sync.prepare(last and self._passes + 1 == self.accumulation)
        torch.autograd.backward(tensors, grads, retain_graph=inputs is not None, inputs=inputs)

    @property
    def is_first_pass(self) -> bool:
        """Whether the next backward pass is the first of a step."""
        return self._passes == 0

    @contextmanager
    def pass_without_trace(self) -> Iterator[TracedPass]:
        """A context manager for the recording of a pass as a CUDA graph: at the end, the counters of the host are restored.

        A recording runs no kernels, so the recorded pass must not be counted.
        """
        before = self._book, self._passes, self._total_passes, self.loss_count, self._watch.unsummed
        self._book, self._traced = self._book.copy(), TracedPass()
        try:
            yield self._traced
        finally:
            self._traced = None
            self._book, self._passes, self._total_passes, self.loss_count, self._watch.unsummed = before

    def replay_pass(self, replay: Callable[[], None], count: Count | None, loss_count: Count | None) -> None:
        """Run recorded forward and backward passes, and count them on the host.

        Args:
            replay: runs the passes, and sets the gradients.
            count: the count of a loss given as (sum, count), in the memory of the recording; None for a mean.
            loss_count: the number of labels of the loss, likewise.

        Raises:
            GradientError: the step is complete already, or the engine has observers, which would not get the recorded loss.
        """
        self._check_not_failed()
        if self.observers:
            raise GradientError(
                f"cuda_graph=True: {type(self.observers[0]).__name__} observes the loss of every pass, which recorded passes do not "
                f"pass on; use cuda_graph='step'",
                code="C071",
            )
        self._begin_pass()
        with self._watched_pass():
            replay()
        self._book.add(count)
        self.loss_count = loss_count.clone() if isinstance(loss_count, Tensor) else loss_count

    def note_loss(self, count: Count | None, here: bool = True, *, trains: bool = True) -> None:
        """Record the loss count of a schedule that does not call `backward`.

        Args:
            count: the count of a loss given as (sum, count); None for a mean.
            here: whether this rank of a pipeline reports the count.
            trains: whether the schedule runs backward passes itself; False if it runs only forward.
        """
        self.loss_count = count
        if trains:
            self._book.add(count, here=here)

    def step(self) -> bool:
        """Reduce the gradients, clip and step, if this was the last micro-step of a step.

        Returns whether this was the last micro-step.

        Collective over the world. A step is `_sum_gradients` (compare the batches, all-reduce, check) and then `_finish_step`
        (norm, clipping, optimizer). Between the two, gradients are final and not clipped: `Observer.on_reduced` sees them there.

        Raises:
            GradientError: no backward pass was run, or the last backward pass failed. Raised on all ranks if a rank has abandoned
                the step after an error, or if ranks have different batches or forms of the loss.
        """
        # A wrong order of calls is an error of this rank only. It raises on all ranks: the others would wait for its gradients.
        if self._passes == 0:
            with self._raise_on_all_ranks():
                raise GradientError(
                    "step() was called before backward(), so there are no gradients to apply. Call "
                    "engine.backward(loss), not loss.backward(), because loss.backward() does not reduce gradients "
                    "over the ranks.",
                    code="C046",
                )
        self._check_not_failed()
        if self._passes < self.accumulation:
            return False
        self._finish_step(self._sum_gradients())
        return True

    def _sum_gradients(self) -> StepOutcome:
        """First half of a step, up to final gradients. Also run, without gradients, by a rank that abandons the step."""
        abandoned = self._failed

        # Compare batches first. Once gradients of different batches are added up, nothing shows the mistake.
        self.same_batch.end_step(self._book.counted, complete=not abandoned)

        # Reduce. The divisor of losses given as (sum, count) is the count of all ranks, which no rank knew during backward. The
        # counts were sent with the first bucket, or are added up here, and give a factor on the reduced gradients.
        scale = self._book.scale(self._sync, self._stepper.scaler)
        with self.context.waits.during("summing the gradients", "communication"):
            outcome = self._sync.finish(scale, counts=self._book.takes_part)

        # A rank that abandoned the step because of an error has sent the error as its reason, and all ranks raise it: the same
        # mistake is probably in the code of all, and no rank may go on without the others. A failed backward pass has no reason;
        # then the step is only skipped.
        if outcome.reasons:
            reason = next(iter(outcome.reasons.values()))
            ranks = [rank for rank, other in outcome.reasons.items() if other == reason]
            self._watch.unsummed = False
            self._stepper.note_failed(outcome.failed_ranks)
            self._forget_passes()
            raise error_of(reason, ranks, self.context.get_global_rank())
        self._book.refuse_two_forms()

        # Gradients are final. Observers come before the checks of the first step, which may raise.
        self.observers.reduced(outcome.scale)
        self._watch.end_sums(complete=not abandoned)
        self._stepper.note_failed(outcome.failed_ranks)
        return outcome

    def _finish_step(self, outcome: StepOutcome) -> None:
        """Second half of a step: norm, clipping, optimizer, fp16 loss scale, observers."""
        # With NCCL the host does not know yet whether a rank has abandoned the step, so `failed_ranks` is empty and all ranks
        # step, also the one that failed: the drop flag of the world makes the step a no-op on the device.
        try:
            if not outcome.failed_ranks:
                self._stepper.step(outcome)
                if not self._failed:
                    self.observers.stepped()
        except BaseException:
            # A norm that is not finite, for example. The loop may catch the error and begin the next step as usual.
            self._forget_passes()
            raise
        self._end_step()

    def _end_step(self) -> None:
        self._forget_passes()
        self._watch.end_step()
        # Last: from here on, ranks that wait see this one outside of the step.
        self.context.waits.end_step()

    def _forget_passes(self) -> None:
        self._passes, self._failed = 0, False
        self._book.clear()

    # -- a step that a rank abandons --------------------------------------------------------------------------

    def _check_not_failed(self) -> None:
        if self._failed:
            raise GradientError(
                "the last backward pass of this step failed, so the gradients are incomplete. Call "
                "engine.zero_grad() to abandon the step on all ranks, and continue with the next batch.",
                code="C046",
            )

    @contextmanager
    def _raise_on_all_ranks(self) -> Iterator[None]:
        """A context manager around code that may raise on this rank only: an error abandons the step, and all ranks
        raise it.
        """
        try:
            yield
        except GradientError as error:
            if self.context.world_size > 1 and not self._ranks_without_common_sum():
                get_dist_logger().error(f"rank {self.context.get_global_rank()} abandons this step: {error}")
                with suppress(GradientError):
                    self._abandon_step(note_of(error))
            raise

    def _ranks_without_common_sum(self) -> list[int]:
        """The ranks that share no gradient all-reduce with this one, and so cannot learn that it abandons a step."""
        return sorted(set(range(self.context.world_size)).difference(*self._sync.synchroniser.groups))

    def _abandon_step(self, why: str = "") -> None:
        """Abandon the step on all ranks; with a reason (`why`), all ranks raise it as an error.

        The other ranks continue to the end of the step and wait for this one in its collectives. So this rank goes through the
        rest of the step too, without gradients, with the same messages and collectives in the same places, and with status
        flags that mark it as failed.
        """
        others = self._ranks_without_common_sum()
        if others:
            raise GradientError(
                f"backward failed on this rank. Ranks {listed(others)} share no gradient all-reduce with this rank, "
                "so they do not learn of the failure and would complete the step. Stop the run, and resume from a "
                "checkpoint.",
                code="C046",
            )
        # Gradients of the failed pass are incomplete; zeros are sent in their place.
        self._failed = True
        for parameter in self._model.parameters():
            parameter.grad = None
        # The micro-steps that the others still make: each with the reductions at its end (ZeRO 2 reduces in every micro-step), and
        # in a loop over `batches` with the agreement on a next batch. This rank did not make them, so its total stays.
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
        """Set the model to training mode, or with `mode=False` to evaluation mode."""
        self.training = self.same_batch.training = mode
        self._model.train(mode)

    def eval(self) -> None:
        """Set the model to evaluation mode."""
        self.train(False)

    def execute_schedule(self, data_iter: Iterator[Any], **kwargs: Any) -> StepResult:
        """Run the forward and backward passes of one micro-step by the schedule.

        Args:
            data_iter: yields the batch, or with a pipeline schedule the batch that it splits into micro-batches.
            **kwargs: passed to the schedule: `forward_only`, `return_loss`, `return_output_label`.

        Returns:
            (output, label, loss).
        """
        before = self._total_passes
        self.loss_count = None
        with self.context.waits.during("in the passes of the schedule", "forward"):
            result = checked_result(self._schedule, self._schedule.forward_back_step(self, data_iter, **kwargs))
        if not kwargs.get("forward_only", False):
            self.gives_loss = True
            # `backward` has counted no micro-step: a pipeline runs its backward passes itself, all of them as one micro-step.
            if self._total_passes == before:
                if not self._schedule.runs_backward:
                    raise ScheduleError(
                        f"{type(self._schedule).__name__}.forward_back_step() returned without engine.backward(loss): "
                        f"the model would not be trained on this batch. Call engine.backward, or pass "
                        f"forward_only=True to evaluate."
                    )
                self._count_pass()
                if self._passes == self.accumulation:
                    # If no backward pass was marked as the last (several chunks, or none that reached a parameter),
                    # reductions start here.
                    self._sync.prepare(last=True)
                self.observers.loss(result[2])
        return result

    def batches(self, loader: Iterable[Any], after_step: Callable[[], Any] | None = None) -> Iterator[Any]:
        """Iterate over the batches of `loader`. The number of batches may differ between ranks. Collective over the world.

        When a rank has no batches left, it takes part in the remaining steps of the other ranks inside this iterator, with weight
        0 in the mean. The loop body must call `backward` and `step` once per batch.

        Args:
            loader: the batches of this rank.
            after_step: called after each step that this rank makes without a batch, such as `lr_scheduler.step`.

        Raises:
            GradientError: ZeRO stage 3 is used, where every forward pass needs all ranks; or the loop body does not call `backward`
                and `step` exactly once.

        Example::

            gpc = colonnade.launch({})
            model = nn.Linear(4, 2)
            engine, *_ = colonnade.initialize(model, torch.optim.AdamW(model.parameters()), nn.MSELoss())
            loader = [(torch.ones(8, 4), torch.ones(8, 2))] * (1 + gpc.get_global_rank())
            for x, y in engine.batches(loader):
                engine.zero_grad()
                engine.backward(engine.criterion(engine(x), y))
                engine.step()
        """
        if self.gathers_weights:
            raise GradientError(
                "engine.batches() is not available with FSDP2 (ZeRO stage 3), because every forward pass gathers "
                "parameters from all ranks. A rank cannot run out of batches before the others. Give all ranks the "
                "same number of batches, and loop over the loader directly. Or use stage 2.",
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
                    # A loop that has caught the error of its backward pass may leave the rest to this generator.
                    if self._failed:
                        self._abandon_step()
                    passes = self._total_passes - before
                    if passes != 1 or self._passes == self.accumulation:
                        raise GradientError(
                            f"the body of a loop over engine.batches() called backward() {passes} times for one "
                            f"batch, and {self._passes} of {self.accumulation} passes wait for step(). Call "
                            "backward() and step() once for each batch. Ranks cannot agree on the number of batches "
                            "in any other case.",
                            code="C046",
                        )
            # No rank has a batch left, but the last step is not full: complete it, on all ranks.
            while self._passes:
                self._pass_without_batch(after_step)
        finally:
            self._book.uneven = False

    def _pass_without_batch(self, after_step: Callable[[], Any] | None) -> None:
        """Take part in a micro-step of the other ranks with zero gradients and weight 0 in the mean."""
        self.zero_grad()
        self._begin_pass()
        self._sync.synchroniser.end_backward()
        if self.step() and after_step is not None:
            after_step()

    @property
    def gathers_weights(self) -> bool:
        """Whether every forward pass all-gathers weights (ZeRO stage 3), so that no rank may omit a forward pass."""
        return any(hasattr(module, "unshard") for module in self._model.modules())

    def ledger(self) -> Ledger:
        """The ledger: every gradient reduction with its parameter, ranks, divisor and handler."""
        return self._sync.ledger

    def precision_table(self) -> PrecisionTable:
        """The dtypes of weights, gradients and optimizer state, with their bytes per parameter on this rank."""
        return precision_table(self._model, self.engine_optimizer, self._sync.synchroniser, self._precision.dtype)

    def memory(self, reset: bool = False) -> MemoryTable:
        """The memory of this rank by use, now and at its peak; `reset` restarts the measurement of the peak."""
        sizes, device = self.precision_table(), self.context.device
        return memory_table(self._model, self.engine_optimizer, self._sync.synchroniser, sizes, device, reset)

    def close(self) -> None:
        """Remove hooks and free shared memory; the model remains usable without the engine."""
        self._watch.close()
        self._stepper.close()
        self._sync.close()
        self._precision.undo(self._model, self._criterion)

    # -- scales and state ---------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float | Tensor:
        """The factor on a mean loss before backward: 1/accumulation, times the fp16 loss scale."""
        scaler = self._stepper.scaler
        return (scaler.scale if scaler is not None else 1.0) / self.accumulation

    @property
    def sum_scale(self) -> float | Tensor:
        """The factor on the sum of a (sum, count) loss before backward: with fp16 the loss scale divided by its `count`."""
        scaler = self._stepper.scaler
        return scaler.scale / scaler.count if scaler is not None else 1.0

    def extra_state(self) -> dict[str, Any]:
        """State for the `extra` of a checkpoint, in addition to model and optimizer: clip history and loss scale."""
        return self._stepper.extra_state()

    def load_extra_state(self, extra: Mapping[str, Any]) -> None:
        """Load the result of `extra_state`; other keys are ignored."""
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
        """The `EngineOptimizer` that the engine calls, with sharded gradients and state and pending all-gathers."""
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
    def gradient_handlers(self) -> list[Any]:
        """The gradient handlers in the order in which they run."""
        return list(self._sync.handlers)

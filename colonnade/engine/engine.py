"""Engine: the model, its optimizer and its loss as one thing to call in a training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.comm.messages import error_of, note_of
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.checks.loop_watch import LoopWatch
from colonnade.engine.checks.same_batch import SameBatch
from colonnade.engine.checks.stage_call import refuse_batch
from colonnade.engine.gradient_handler.ledger import Ledger
from colonnade.engine.gradient_handler.sync import GradientSync
from colonnade.engine.last_step import LastStep
from colonnade.engine.losses import LossBook
from colonnade.engine.memory import MemoryTable, memory_table
from colonnade.engine.observers import Observers
from colonnade.engine.precision import Precision, PrecisionTable, precision_table
from colonnade.engine.schedule.base import BaseSchedule, StepResult, checked_result
from colonnade.engine.schedule.loss import Count
from colonnade.engine.stepper import Stepper
from colonnade.engine.weights import WholeWeights
from colonnade.errors import GradientError, ScheduleError, listed
from colonnade.hf.loss import ModelLoss
from colonnade.logging import get_dist_logger

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
        own_loss: ModelLoss | None = None,
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
        with self._told_to_all():
            value, count, self._schedule.loss_count = self._book.read(loss)
            self._book.add(count)
            self._begin_pass()
        self.observers.loss(loss)
        with self._watched_pass():
            (value * (self.loss_scale if count is None else self.sum_scale)).backward()

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
        ends = last and self._passes + 1 == self.accumulation and not isinstance(self._model, nn.ModuleList)
        self._sync.prepare(ends)
        torch.autograd.backward(tensors, grads, retain_graph=inputs is not None, inputs=inputs)

    def note_loss(self, count: Count | None, here: bool) -> None:
        """Said once a step by a schedule that runs its backward passes itself: the count of a loss given as
        (sum, count), or None for a mean; `here` on the one rank of the pipeline that knows it."""
        self._book.add(count, here=here)

    def step(self) -> bool:
        """Reduce, clip and step, if this was the last pass of the step; returns whether it was."""
        if self._passes == 0:
            with self._told_to_all():
                raise GradientError(
                    "step() before backward(): there are no gradients to apply. Write engine.backward(loss), not "
                    "loss.backward(): that one sums nothing over the ranks",
                    code="C046",
                )
        self._check_not_failed()
        if self._passes < self.accumulation:
            return False
        self._reduce()
        try:
            if not self._sync.synchroniser.failed_ranks:
                self._stepper.step()
                self.observers.stepped()
        except BaseException:  # that the caller may catch, and go on with the next step
            self._forget_passes()
            raise
        self._end_step()
        return True

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
        self._schedule.loss_count = None
        with self.context.waits.during("in the passes of the schedule", "forward"):
            result = checked_result(self._schedule, self._schedule.forward_back_step(self, data_iter, **kwargs))
        if not kwargs.get("forward_only", False):
            self.gives_loss = True
            if self._total_passes == before:
                self._end_schedule()
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
                if not self._book.someone_has(batch is not _NO_BATCH):
                    break
                if batch is _NO_BATCH:
                    self._pass_without_batch(after_step)
                else:
                    before = self._total_passes
                    yield batch
                    if self._failed:
                        self._give_up_step()
                    self._check_body(self._total_passes - before)
            while self._passes:
                self._pass_without_batch(after_step)
        finally:
            self._book.uneven = False

    @property
    def gathers_weights(self) -> bool:
        """Whether the ranks gather weights of each other in every forward pass (zero stage 3), so that none may leave one out."""
        return any(hasattr(module, "unshard") for module in self._model.modules())

    def ledger(self) -> Ledger:
        """Which reduction each parameter owes and which handler does it."""
        return self._sync.ledger

    def precision_table(self) -> PrecisionTable:
        """What lies in which dtype, and how many bytes per parameter this rank has of it."""
        return precision_table(self._model, self._optimizer, self._sync.synchroniser, self._precision.dtype)

    def memory(self, reset: bool = False) -> MemoryTable:
        """What this rank's memory is for, now and at its peak; `reset`: the next peak is one from now on."""
        sizes, device = self.precision_table(), self.context.device
        return memory_table(self._model, self._optimizer, self._sync.synchroniser, sizes, device, reset)

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

    # -- inside -------------------------------------------------------------------------------------------

    @contextmanager
    def _watched_pass(self) -> Iterator[None]:
        """A backward pass: one that fails leaves the step to `zero_grad`, one that ends is told of."""
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

    @contextmanager
    def _told_to_all(self) -> Iterator[None]:
        """An error in here that this rank alone may have made: it gives the step up, and all ranks raise the error."""
        try:
            yield
        except GradientError as error:
            if self.context.world_size > 1 and not self._unheard_by():
                get_dist_logger().error(f"rank {self.context.get_global_rank()} gives this step up: {error}")
                with suppress(GradientError):
                    self._give_up_step(note_of(error))
            raise

    def _unheard_by(self) -> list[int]:
        """The ranks with which this one sums no gradient: they would not hear that it gives a step up."""
        return sorted(set(range(self.context.world_size)).difference(*self._sync.synchroniser.groups))

    def _give_up_step(self, why: str = "") -> None:
        """Take part in the others' step with nothing, and have all ranks drop it; all raise, if told `why`."""
        others = self._unheard_by()
        if others:
            raise GradientError(
                f"backward failed on this rank, and no gradient is summed with ranks {listed(others)}, so ranks "
                f"{listed(others)} would not hear of it and would step; end the run, and resume from a checkpoint",
                code="C046",
            )
        self._failed = True
        for parameter in self._model.parameters():
            parameter.grad = None
        total = self._total_passes
        while self._passes < self.accumulation:
            self._sync.synchroniser.end_backward()
            if self._book.uneven:  # before each pass the other ranks ask who has a batch
                self._book.someone_has(True)
            self._begin_pass()
        self._total_passes = total
        self._sync.synchroniser.fail(why)
        self._sync.synchroniser.end_backward()
        self._reduce()
        if not self._sync.synchroniser.failed_ranks:  # a quiet step: the others drop it on the device
            self._stepper.step()
        self._end_step()

    def _check_not_failed(self) -> None:
        if self._failed:
            raise GradientError(
                "the last backward pass of this step failed, so its gradients are not whole; call engine.zero_grad(), which "
                "gives the step up (the other ranks drop it too), and go on with the next batch",
                code="C046",
            )

    def _begin_pass(self) -> None:
        self._count_pass()
        self._sync.prepare(last := self._passes == self.accumulation)
        if last:
            self._book.carry(self._sync.synchroniser, self._stepper.scaler)

    def _count_pass(self) -> None:
        """Count one pass of a step."""
        if self._passes == self.accumulation:
            raise GradientError(
                f"backward() was called {self._passes + 1} times for one step, which has {self.accumulation}; call "
                f"step() after each, add up losses that belong together, or set gradient_accumulation in the config",
                code="C046",
            )
        self._passes += 1
        self._total_passes += 1
        self._watch.unsummed = True

    def _end_schedule(self) -> None:
        """Count the pass of a schedule that runs its backward passes itself."""
        if not self._schedule.runs_backward:
            raise ScheduleError(
                f"{type(self._schedule).__name__}.forward_back_step() returned without engine.backward(loss): this batch "
                f"would not be learnt from. Call engine.backward, or pass forward_only=True to evaluate."
            )
        self._count_pass()
        if self._passes == self.accumulation:
            self._sync.prepare(last=True)

    def _pass_without_batch(self, after_step: Callable[[], Any] | None) -> None:
        """Take part in a pass of the other ranks."""
        self.zero_grad()
        self._begin_pass()
        self._sync.synchroniser.end_backward()
        if self.step() and after_step is not None:
            after_step()

    def _check_body(self, passes: int) -> None:
        if passes != 1 or self._passes == self.accumulation:
            raise GradientError(
                f"the body of a loop over engine.batches() called backward() {passes} times and left "
                f"{self._passes} of {self.accumulation} passes; call backward() and step() once for every batch, or the "
                f"ranks lose count of each other",
                code="C046",
            )

    def _reduce(self) -> None:
        self.same_batch.end_step(self._book.counted, whole=not self._failed)
        self._sync.synchroniser.counts = self._book.takes_part
        self._book.set_scale(self._sync, self._stepper.scaler)
        with self.context.waits.during("summing the gradients", "communication"):
            self._sync.finish()
        told = self._sync.synchroniser.why_failed
        if told:
            first, *_ = told
            self._watch.unsummed = False
            self._stepper.note_failed(self._sync.synchroniser.failed_ranks)
            self._forget_passes()
            ranks = [rank for rank in told if told[rank] == told[first]]
            raise error_of(told[first], ranks, self.context.get_global_rank())
        self._book.refuse_two_forms()
        self.observers.reduced(self._sync.scale)
        self._watch.end_sums(complete=not self._failed)
        self._stepper.note_failed(self._sync.synchroniser.failed_ranks)

    def _end_step(self) -> None:
        self._forget_passes()
        self._watch.end_step()
        self.context.waits.end_step()

    def _forget_passes(self) -> None:
        self._passes, self._failed = 0, False
        self._book.clear()

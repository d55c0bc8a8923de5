"""The schedule classes: the base class, and the schedules that a config can name.

A custom schedule is a subclass of `BaseSchedule`, registered in `SCHEDULE` and named in the config. The engine calls
`pre_processing` once and `forward_back_step` for each batch. A schedule that runs its backward passes itself sets
`runs_backward`, calls `engine.backward_micro_batch` for each of them and `engine.note_loss` once; any other schedule calls
`engine.backward(loss)` once. `load_batch` splits a batch of the loader into data and label and moves it to the device.

`NonPipelineSchedule` runs the unsplit model. `PipelineSchedule` decides order and micro-batches and leaves the rest to the
executor. `TableSchedule` takes a custom order as a table; the classes at the end are the named orders. A custom order is a function
in `ORDERS` (`orders.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from colonnade.context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.schedule.actions import Row, Table, parse_table, read_csv
from colonnade.engine.schedule.loss import DivisionWatch, LossForm, call_criterion, required_arguments, split_loss
from colonnade.engine.schedule.micro_batch import MicroBatch, call_module, format_value, join, split_into_micro_batches
from colonnade.engine.schedule.orders import check_chunks, loop_stages, make_table
from colonnade.engine.schedule.replay import check
from colonnade.errors import ScheduleError
from colonnade.parallel.split import call_layer
from colonnade.parallel.wire import backends_of
from colonnade.registry import ORDERS, SCHEDULE

if TYPE_CHECKING:
    from colonnade.engine.schedule.executor import Executor


StepResult = tuple[Any, Any, Tensor | None]
"""(output or None, label or None, loss or None)"""


class BaseSchedule(ABC):
    """Runs the forward and backward passes of one step on an engine.

    Implement `forward_back_step` (a subclass with Colossal-AI's `forward_backward_step` works, too), register the class
    in `SCHEDULE`, and choose it with `schedule=dict(type="YourSchedule", ...)`.

    Args:
        data_process_func: Maps a batch of the loader to (data, label). By default the "labels" (or "label") of a dict
            are the label if the criterion takes two arguments and the model does not require them; any other dict goes
            to the model unchanged.
    """

    runs_backward = False
    """Whether the schedule runs the backward passes itself (a pipeline); else it must call `engine.backward` once a step."""

    calls_backward = True
    """Whether `engine.backward` may be called now. A schedule that records the passes allows it only while it runs them."""

    _take_dict_apart: Callable[[Mapping[str, Any]], tuple[Any, Any]] | None = None
    """For a model that computes its own loss, in a pipeline: splits a dict into (data, label)."""

    _label_keys: tuple[str, ...] = ()
    """The keys of a dict that may be its label."""

    uses_batch = True
    """Whether this rank computes with its batch; a stage in the middle of a pipeline only keeps its loader in step."""

    def __init__(self, data_process_func: Callable[..., tuple[Any, Any]] | None = None) -> None:
        self.data_process_func = data_process_func
        self.batch_size = 0
        self.device = torch.device("cpu")
        self._same_batch: Any = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "forward_backward_step" in cls.__dict__ and "forward_back_step" not in cls.__dict__:
            cls.forward_back_step = cls.__dict__["forward_backward_step"]  # type: ignore[method-assign]

    def pre_processing(self, engine: Any) -> None:
        """Called once, when the engine is built, for checks and buffers. An override must call super."""
        self.device = engine.context.device
        criterion, own_loss = getattr(engine, "criterion", None), getattr(engine, "own_loss", None)
        self.choose_label_keys(getattr(engine, "model", None), criterion, own_loss)
        self._same_batch = getattr(engine, "same_batch", None)  # not the engine: the cycle would keep it alive

    def choose_label_keys(self, model: Any, criterion: Any, own_loss: Any) -> None:
        """Choose the entries of a batch dict that are its label.

        `own_loss`: the `OwnLoss` of a model that computes its loss, or None.
        """
        takes_label, needed = len(required_arguments(criterion)) > 1, required_arguments(model)
        self._take_dict_apart = own_loss.unpack_batch if own_loss is not None and criterion is not None else None
        self._label_keys = tuple(key for key in ("labels", "label") if takes_label and key not in needed)

    @abstractmethod
    def forward_back_step(
        self,
        engine: Any,
        data_iter: Iterator[Any],
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> StepResult:
        """Run one step: load the batch, run the forward and, unless `forward_only`, the backward passes.

        Gradients are left in `.grad`; the optimizer does not step.

        Returns:
            (output, label, loss). Each is None if it was not requested or is not known on this rank.
        """

    def load_batch(self, data_iter: Iterator[Any], to_gpu: bool = True) -> tuple[Any, Any]:
        """Load the next batch and return (data, label), on the engine's device if `to_gpu`."""
        if data_iter is None:
            raise ScheduleError(
                "this schedule needs a data iterator on this rank, but got None. Pass iter(dataloader).", code="C051"
            )
        batch = next(data_iter)
        data, label = self.unpack_batch(batch)
        self.batch_size = num_rows(data)
        if to_gpu:
            data, label = move(data, self.device), move(label, self.device)
        if self._same_batch is not None and self.uses_batch:
            self._same_batch.see(data, label)
        return data, label

    def unpack_batch(self, batch: Any) -> tuple[Any, Any]:
        """Split a batch of the loader into (data, label)."""
        if self.data_process_func is not None:
            return self.data_process_func(batch)
        if isinstance(batch, (list, tuple)) and len(batch) == 2:
            return batch[0], batch[1]
        if isinstance(batch, Mapping):
            if self._take_dict_apart is not None:
                return self._take_dict_apart(batch)
            key = next((key for key in self._label_keys if key in batch), None)
            data = {name: value for name, value in batch.items() if name != key}
            return data, None if key is None else batch[key]
        if isinstance(batch, Tensor):
            return batch, None
        length = f" of {len(batch)}" if isinstance(batch, (list, tuple)) else ""
        raise ScheduleError(
            "a batch must be (data, label), a dict or a tensor, but the loader returned a "
            f"{type(batch).__name__}{length}. Pass data_process_func=lambda batch: (data, label) to the schedule.",
            code="C051",
        )


def checked_result(schedule: BaseSchedule, result: Any) -> StepResult:
    """Return the result of `forward_back_step`; raises if it is not (output, label, loss)."""
    if not isinstance(result, (tuple, list)) or len(result) != 3:
        raise ScheduleError(
            f"{type(schedule).__name__}.forward_back_step() returned {format_value(result)}. Return (output, label, "
            "loss), and use None for each value that is not requested or not known on this rank.",
            code="C051",
        )
    output, label, loss = result
    return output, label, loss


def move(value: Any, device: torch.device) -> Any:
    """Move every tensor of a nested value to `device`."""
    return tree_map(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, value)


def num_rows(data: Any) -> int:
    """The size of dimension 0 of the first tensor in a nested value; 0 if there is none."""
    return next((leaf.size(0) for leaf in tree_leaves(data) if isinstance(leaf, Tensor) and leaf.dim()), 0)


@SCHEDULE.register_module
class NonPipelineSchedule(BaseSchedule):
    """Runs the unsplit model on each batch. A dict of data is passed by keyword, a list or tuple by position."""

    def forward_back_step(
        self,
        engine: Any,
        data_iter: Iterator[Any],
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> StepResult:
        data, label = self.load_batch(data_iter)
        if label is None and engine.criterion is None and isinstance(data, dict):
            label = data.get("labels")  # the model takes them as data; hooks of the trainer may need them, too
        with torch.set_grad_enabled(not forward_only):
            output = call_layer(engine, data)
            loss = call_criterion(engine.criterion, output, label) if return_loss or not forward_only else None
        if not forward_only:
            engine.backward(loss)
        elif loss is not None:
            engine.note_loss(split_loss(loss)[1], trains=False)
        mean = None
        if loss is not None and return_loss:
            mean = (loss[0] / loss[1] if isinstance(loss, (tuple, list)) else loss).detach()
        return (output, label, mean) if return_output_label else (None, None, mean)


TableSource = str | Path | Mapping[int, Row] | Sequence[Row]
"""A CSV file, or the rows: one per pipeline rank."""


@SCHEDULE.register_module
class PipelineSchedule(BaseSchedule):
    """Runs pipeline steps in the order of a table.

    The engine must have `context`, `model` (this rank's stage, or an nn.ModuleList of its stages in order), `criterion`,
    `loss_scale` and `sum_scale` (factors of a mean, and of the sum of a (sum, count), for the backward pass),
    `backward_micro_batch` (a `RunBackward`), and `note_loss(count, here, trains=)`: the count of the step's loss, None for a
    mean; whether this rank has the last stage; whether gradients were computed from it.

    Args:
        num_microbatches: The number of micro-batches per batch; None: the number in `table`.
        order: A name in `ORDERS`: gpipe, 1f1b, interleaved_1f1b, breadth_first, interleaved_zero_bubble, zb_v, dualpipe_v, or
            a custom order.
        num_chunks: Stages per rank, for orders that allow several.
        data_process_func: batch -> (data, label); or, with two arguments, (output of the previous stage or None, (data, label)
            of the micro-batch) -> (inputs of the stage, label), called on every stage.
        tensor_shape: If given, the shape that every stage except the last must return. Optional.
        table: A custom order instead of `order`: a CSV file, or rows such as "0F0 0F1 0B0 0B1".
        loss_reduction: How the criterion reduces over rows. Means of unequal micro-batches are weighted by their rows. A
            criterion may also return (sum, count), which is divided once, by the count of all ranks; a mean
            cross-entropy, which may ignore labels, is read as (sum, count).
        loss_everywhere: Whether all ranks return the loss, not only the rank of the last stage.

    Raises:
        ScheduleError: If an argument is wrong or the table cannot run.
    """

    runs_backward = True

    def __init__(
        self,
        num_microbatches: int | None,
        order: str = "1f1b",
        num_chunks: int | None = None,
        data_process_func: Callable[..., tuple[Any, Any]] | None = None,
        tensor_shape: Sequence[int] | None = None,
        table: TableSource | None = None,
        *,
        loss_reduction: Literal["mean", "sum"] = "mean",
        loss_everywhere: bool = True,
    ) -> None:
        by_stage = False
        if data_process_func is not None:
            count = len(required_arguments(data_process_func))
            if count not in (1, 2):
                raise ScheduleError(
                    f"data_process_func must take (batch) or (stage_output, micro_batch), not {count} arguments",
                    code="C051",
                )
            by_stage = count == 2
        self._stage_data_func = data_process_func if by_stage else None
        super().__init__(None if self._stage_data_func else data_process_func)
        self._table: Table | None = None
        if table is not None:
            self._table = read_csv(table) if isinstance(table, (str, Path)) else parse_table(table)
        self.num_microbatches = _num_microbatches(num_microbatches, self._table)
        self.num_chunks = check_chunks(order, num_chunks) if self._table is None else num_chunks
        if loss_reduction not in ("mean", "sum"):
            raise ScheduleError(f"loss_reduction must be 'mean' or 'sum', not {loss_reduction!r}", code="C051")
        self.order, self.tensor_shape = order, tensor_shape
        self._loss_reduction, self._loss_everywhere = loss_reduction, loss_everywhere
        self._executor: Executor | None = None
        self._switch_virtual_rank: Callable[[int], None] | None = None
        self.last_order: list[str] = []
        """The compute actions of this rank's last step, in the order in which they ran."""

    def table(self, num_ranks: int) -> Table:
        """The checked table for a pipeline of `num_ranks` ranks; needs no process group."""
        table = self._table or make_table(self.order, num_ranks, self.num_microbatches, self.num_chunks)
        facts = check(table, num_microbatches=self.num_microbatches)
        if facts.num_ranks != num_ranks:
            raise ScheduleError(
                f"this table is for {facts.num_ranks} pipeline ranks, and the pipeline has {num_ranks}", code="C051"
            )
        return table

    def stage_ranks(self, num_ranks: int) -> tuple[int, ...]:
        """The rank of each stage, in a pipeline of `num_ranks` ranks."""
        return check(self.table(num_ranks)).stage_ranks

    def open_groups(self, context: ParallelContext) -> None:
        """Create the process groups that `pre_processing` needs, before any action that may fail on a single rank.

        Collective over the world.
        """
        if context.pipeline_parallel_size > 1:
            _transfer_groups(context)

    def pre_processing(self, engine: Any) -> None:
        """Check that the table fits the world and the model, and build the executor.

        Collective over the world.
        """
        super().pre_processing(engine)
        if self._stage_data_func:
            self._label_keys = ()  # the function splits batches itself
        context = engine.context
        piped = context.is_initialized(ParallelMode.PIPELINE)
        ranks = context.get_ranks_in_group(ParallelMode.PIPELINE) if piped else [context.get_global_rank()]
        several = len(ranks) > 1
        # Groups before the table, whose check may raise on some ranks only: creating groups is collective over the world.
        transfer_group, down_group = _transfer_groups(context) if several else (None, None)
        model = engine.model
        # Imported here: a run without a pipeline does not need the executor and its links.
        from colonnade.engine.schedule.executor import Executor

        self._executor = Executor(
            list(model) if isinstance(model, nn.ModuleList) else [model],
            self.table(len(ranks)),
            rank=ranks.index(context.get_global_rank()),
            ranks=ranks,
            group=context.get_group(ParallelMode.PIPELINE) if several else None,
            transfer_group=transfer_group,
            down_group=down_group,
            device=context.device,
            forward=self._forward,
            loss_fn=partial(_watched_loss, engine.criterion, DivisionWatch(self._divisors(engine))),
            loss_form=partial(LossForm, self._loss_everywhere, self._loss_reduction == "mean"),
            backward=engine.backward_micro_batch,
            tensor_shape=self.tensor_shape,
            waits=context.waits,
        )
        # Only the ends of a pipeline compute with the batch, unless `data_process_func` is called on every stage.
        ends = self._executor.has_first_stage or self._executor.has_last_stage
        self.uses_batch = ends or self._stage_data_func is not None
        self._switch_virtual_rank = _virtual_rank_switch(context, self._executor.facts.stage_ranks)

    def forward_back_step(
        self,
        engine: Any,
        data_iter: Iterator[Any] | None,
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> StepResult:
        """Run one step (see `BaseSchedule`). Only the rank of the last stage returns output and label.

        Every rank reads its loader, so that all iterators are at the same batch. `data_iter` may be None on a rank with neither
        the first nor the last stage.

        Collective over the pipeline: all its ranks must pass the same flags.
        """
        if self._executor is None:
            self.pre_processing(engine)
        executor = self._executor
        assert executor is not None
        with_loss = return_loss or not forward_only
        # Sharing the loss makes all ranks wait for the last stage, so the step may as well end on all of them together.
        shares_loss = with_loss and self._loss_everywhere
        # A rank without a batch takes part nevertheless: the others would wait for it in `run`.
        try:
            micro_batches, label = self._micro_batches(data_iter, fill=forward_only)
        except Exception as error:
            raise executor.refuse(error, forward_only=forward_only, confirm=shares_loss) from error.__cause__
        step = executor.run(
            micro_batches,
            forward_only=forward_only,
            with_loss=with_loss,
            keep_outputs=return_output_label,
            confirm=shares_loss,
            backward_scale=engine.loss_scale,
            sum_scale=engine.sum_scale,
        )
        self.last_order = [str(action) for action in step.order]
        loss, count = step.loss, step.count
        if shares_loss:
            loss, count = executor.share_loss(step.loss, step.count)
        engine.note_loss(count, executor.has_last_stage, trains=not forward_only)
        loss = loss if return_loss else None
        if not (return_output_label and executor.has_last_stage):
            return None, None, loss
        if self._stage_data_func:
            label = join([micro_batch.label for micro_batch in micro_batches if micro_batch.counts])
        return join(step.outputs), label, loss

    def _divisors(self, engine: Any) -> dict[str, int]:
        """The numbers by which the loss of a micro-batch is divided, by config key."""
        divided = {"gradient_accumulation": getattr(engine, "accumulation", 1)}
        return divided if self._loss_reduction == "sum" else {"num_microbatches": self.num_microbatches, **divided}

    def _micro_batches(self, data_iter: Iterator[Any] | None, fill: bool) -> tuple[list[MicroBatch], Any]:
        if data_iter is None and not self.uses_batch:
            return [MicroBatch(index) for index in range(self.num_microbatches)], None
        data, label = self.load_batch(data_iter)  # type: ignore[arg-type]  # raises on None
        pieces = split_into_micro_batches(data, label, self.num_microbatches, fill)
        for piece in pieces:
            piece.weight = piece.weight if self._loss_reduction == "mean" else 1.0
            piece.data = (piece.data, piece.label) if self._stage_data_func else piece.data
        return pieces, label

    def _forward(self, stage: int, module: nn.Module, inputs: Any, micro_batch: MicroBatch) -> Any:
        if self._switch_virtual_rank is not None:
            self._switch_virtual_rank(stage)
        if self._stage_data_func:
            before = None if stage == 0 else inputs
            inputs, micro_batch.label = self._stage_data_func(before, micro_batch.data)
        return call_module(stage, module, inputs, micro_batch)


def _watched_loss(criterion: Any, watch: DivisionWatch, output: Any, label: Any) -> Any:
    """Return the loss of a micro-batch.

    In training, warn if the user's code divides the loss by a number by which the engine divides it too.
    """
    loss = call_criterion(criterion, output, label)
    if torch.is_grad_enabled():
        watch.look(
            loss, {len(leaf) for leaf in tree_leaves((output, label)) if isinstance(leaf, Tensor) and leaf.dim()}
        )
    return loss


def _virtual_rank_switch(context: ParallelContext, stage_ranks: Sequence[int]) -> Callable[[int], None] | None:
    """For a loop order: a function that sets the context's virtual rank to the chunk of a stage. None for other orders."""
    num_ranks = max(stage_ranks) + 1
    num_chunks = len(stage_ranks) // num_ranks
    if num_chunks == 1 or list(stage_ranks) != loop_stages(num_ranks, num_chunks):
        return None
    context.set_virtual_pipeline_parallel_size(num_chunks)
    return lambda stage: context.set_virtual_pipeline_parallel_rank(stage // num_ranks)


def _transfer_groups(context: ParallelContext) -> tuple[Any, Any]:
    """The process groups of this rank's pipeline for transfers: one for all transfers; over NCCL, a second one for tensors that
    are sent to lower ranks.

    They are separate from the pipeline's own group, in which TORCH_DISTRIBUTED_DEBUG=DETAIL compares the collectives of
    all ranks; and they can send headers on the CPU in addition to tensors over NCCL.

    Collective over the world.
    """
    from colonnade.engine.schedule.transfer import with_cpu

    own = context.get_group(ParallelMode.PIPELINE)
    queued = ",".join(f"{kind}:{backend}" for kind, backend in backends_of(own).items() if backend != "gloo")
    both = context.get_second_group(ParallelMode.PIPELINE, with_cpu(own))
    return both, context.get_second_group(ParallelMode.PIPELINE, queued) if queued else None


_MOST_MICROBATCHES = 1 << 16  # the table of passes has a row for each


def _num_microbatches(given: int | None, table: Table | None) -> int:
    if table is not None and given is None:
        return check(table).num_microbatches
    if not isinstance(given, int) or isinstance(given, bool) or not 1 <= given <= _MOST_MICROBATCHES:
        raise ScheduleError(
            f"num_microbatches must be a whole number from 1 to {_MOST_MICROBATCHES}, not {given!r}", code="C051"
        )
    return given


@SCHEDULE.register_module
class TableSchedule(PipelineSchedule):
    """A pipeline with a custom order: a table as a CSV file or as rows, one per pipeline rank. The table is checked before it runs.

    Example::

        schedule = dict(type="TableSchedule", table=["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"])
        gpc = colonnade.launch(dict(parallel=dict(pipeline=2), schedule=schedule))
    """

    def __init__(self, table: TableSource, num_microbatches: int | None = None, **options: Any) -> None:
        super().__init__(num_microbatches, table=table, **options)


def schedule_of(order: str, name: str) -> type[PipelineSchedule]:
    """Create and register a schedule class for one order: `name(num_microbatches, num_chunks, ...)`."""

    def __init__(self: PipelineSchedule, num_microbatches: int, num_chunks: int | None = None, **options: Any) -> None:
        PipelineSchedule.__init__(self, num_microbatches, order, num_chunks, **options)

    attributes = {"__init__": __init__, "__doc__": ORDERS.get_module(order).__doc__, "__module__": __name__}
    return SCHEDULE.register_module(type(name, (PipelineSchedule,), attributes))


GPipe = schedule_of("gpipe", "GPipe")
OneFOneB = schedule_of("1f1b", "OneFOneB")
Interleaved1F1B = schedule_of("interleaved_1f1b", "Interleaved1F1B")
InterleavedPipelineSchedule = schedule_of("interleaved_1f1b", "InterleavedPipelineSchedule")  # its name in Colossal-AI
BreadthFirst = schedule_of("breadth_first", "BreadthFirst")
InterleavedZeroBubble = schedule_of("interleaved_zero_bubble", "InterleavedZeroBubble")
ZBV = schedule_of("zb_v", "ZBV")
DualPipeV = schedule_of("dualpipe_v", "DualPipeV")

"""The schedules that a config can name: the whole model on each batch, and pipelines in any order.

`NonPipelineSchedule` is the one without a pipeline. `PipelineSchedule` says which order and which micro-batches; the executor
does the rest. `TableSchedule` takes an order of the user's as a table, and the classes at the end are the named orders.
A schedule of the user's is a `BaseSchedule` (`base.py`); an order of the user's is a function in `ORDERS` (`orders.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from colonnade.context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.schedule.actions import Row, Table, parse_table, read_csv
from colonnade.engine.schedule.base import BaseSchedule, StepResult
from colonnade.engine.schedule.check import check
from colonnade.engine.schedule.criterion import call_criterion, required_arguments
from colonnade.engine.schedule.loss import DivisionWatch, LossForm, split_loss
from colonnade.engine.schedule.micro_batch import MicroBatch, call_module, cut_batch, join
from colonnade.engine.schedule.orders import check_chunks, loop_stages, make_table
from colonnade.errors import ScheduleError
from colonnade.parallel.split import call_layer
from colonnade.parallel.wire import backends_of
from colonnade.registry import ORDERS, SCHEDULE

if TYPE_CHECKING:
    from colonnade.engine.schedule.executor import Executor


@SCHEDULE.register_module
class NonPipelineSchedule(BaseSchedule):
    """Runs the whole model on each batch. A dict of data goes in by keyword, a list or tuple by position."""

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
            label = data.get("labels")  # a model that makes its own loss takes them; hooks may want to see them
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
    """A pipeline step in any order.

    `order`: a name in `ORDERS` (gpipe, 1f1b, interleaved_1f1b, breadth_first, interleaved_zero_bubble, zb_v,
    dualpipe_v, or one that you registered), with `num_chunks` stages per rank; or `table`: a CSV file, or rows like
    "0F0 0F1 0B0 0B1". `data_process_func`: of a batch, -> (data, label); or of two arguments, (output of the stage
    before or None, (data, label) of the micro-batch) -> (inputs of the stage, label), called on every stage.
    `tensor_shape`: a promise, checked, about what goes from stage to stage; shapes need not be given.
    `loss_reduction`: what the criterion does over rows; means of unequal micro-batches are weighted by rows. A
    criterion may also give (sum, count), which is divided once by the count of all ranks; a mean cross-entropy, which may
    ignore labels, counts as that. `loss_everywhere`: all
    ranks return the loss, not only the last stage's.

    Of the engine it needs `context`, `model` (this rank's stage, or an nn.ModuleList of its stages in order),
    `criterion`, `loss_scale` and `sum_scale` (what a mean, or the sum of a (sum, count), is multiplied by for the
    backward pass), `backward_micro_batch` (a `RunBackward`) and `note_loss(count, here, trains=)`: the count of the
    step's loss, None for a mean, with `here` where the last stage is, and whether gradients were made of it.
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
        by_stage = data_process_func is not None and _num_arguments(data_process_func) == 2
        self._stage_data_func = data_process_func if by_stage else None
        super().__init__(None if self._stage_data_func else data_process_func)
        self._table: Table | None = None
        if table is not None:
            self._table = read_csv(table) if isinstance(table, (str, Path)) else parse_table(table)
        self.num_microbatches = _num_microbatches(num_microbatches, self._table)
        self.num_chunks = check_chunks(order, num_chunks) if self._table is None else num_chunks
        if loss_reduction not in ("mean", "sum"):
            raise ScheduleError(f"loss_reduction is 'mean' or 'sum', not {loss_reduction!r}", code="C051")
        self.order, self.tensor_shape = order, tensor_shape
        self._loss_reduction, self._loss_everywhere = loss_reduction, loss_everywhere
        self._executor: Executor | None = None
        self._switch_virtual_rank: Callable[[int], None] | None = None
        self.last_order: list[str] = []
        """The compute actions of this rank's last step, in the order in which they ran."""

    def table(self, num_ranks: int) -> Table:
        """The checked table for a pipeline of `num_ranks`; needs no process group."""
        table = self._table or make_table(self.order, num_ranks, self.num_microbatches, self.num_chunks)
        facts = check(table, num_microbatches=self.num_microbatches)
        if facts.num_ranks != num_ranks:
            raise ScheduleError(
                f"this table is for {facts.num_ranks} pipeline ranks, and the pipeline has {num_ranks}", code="C051"
            )
        return table

    def stage_ranks(self, num_ranks: int) -> tuple[int, ...]:
        """Which rank of a pipeline of `num_ranks` has each stage."""
        return check(self.table(num_ranks)).stage_ranks

    def open_groups(self, context: ParallelContext) -> None:
        """Before anything that may fail on one rank alone: what `pre_processing` needs of all. Collective over the world."""
        if context.pipeline_parallel_size > 1:
            _transfer_groups(context)

    def pre_processing(self, engine: Any) -> None:
        """Check the order against the world and the model. Collective over the world."""
        super().pre_processing(engine)
        if self._stage_data_func:
            self._label_keys = ()  # it takes batches apart itself
        context = engine.context
        piped = context.is_initialized(ParallelMode.PIPELINE)
        ranks = context.get_ranks_in_group(ParallelMode.PIPELINE) if piped else [context.get_global_rank()]
        several = len(ranks) > 1
        transfer_group, down_group = _transfer_groups(context) if several else (None, None)
        model = engine.model
        # A run without a pipeline does not import the executor and its links.
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
        """Run one step; see BaseSchedule. Collective over the pipeline, with the same flags on all its ranks.

        Every rank reads the loader, so that iterators keep pace; `data_iter` may be None where neither the
        first nor the last stage is. Output and label are returned on the rank of the last stage.
        """
        if self._executor is None:
            self.pre_processing(engine)
        executor = self._executor
        assert executor is not None
        with_loss = return_loss or not forward_only
        confirm = with_loss and self._loss_everywhere  # all ranks wait for the last stage then anyway
        try:
            micro_batches, label = self._micro_batches(data_iter, fill=forward_only)
        except Exception as error:
            raise executor.refuse(error, forward_only=forward_only, confirm=confirm) from error.__cause__
        step = executor.run(
            micro_batches,
            forward_only=forward_only,
            with_loss=with_loss,
            keep_outputs=return_output_label,
            confirm=confirm,
            backward_scale=engine.loss_scale,
            sum_scale=engine.sum_scale,
        )
        self.last_order = [str(action) for action in step.order]
        loss, count = step.loss, step.count
        if with_loss and self._loss_everywhere:
            loss, count = executor.share_loss(step.loss, step.count)
        engine.note_loss(count, executor.has_last_stage, trains=not forward_only)
        loss = loss if return_loss else None
        if not (return_output_label and executor.has_last_stage):
            return None, None, loss
        if self._stage_data_func:
            label = join([micro_batch.label for micro_batch in micro_batches if micro_batch.counts])
        return join(step.outputs), label, loss

    def _divisors(self, engine: Any) -> dict[str, int]:
        """The numbers by which a loss of a micro-batch is divided, by key of the config."""
        divided = {"gradient_accumulation": getattr(engine, "accumulation", 1)}
        return divided if self._loss_reduction == "sum" else {"num_microbatches": self.num_microbatches, **divided}

    def _micro_batches(self, data_iter: Iterator[Any] | None, fill: bool) -> tuple[list[MicroBatch], Any]:
        if data_iter is None and not self.uses_batch:
            return [MicroBatch(index) for index in range(self.num_microbatches)], None
        data, label = self.load_batch(data_iter)  # type: ignore[arg-type]  # None is its error to tell
        pieces = cut_batch(data, label, self.num_microbatches, fill)
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
    loss = call_criterion(criterion, output, label)
    if torch.is_grad_enabled():  # an evaluation has no gradient that is too small
        watch.look(
            loss, {len(leaf) for leaf in tree_leaves((output, label)) if isinstance(leaf, Tensor) and leaf.dim()}
        )
    return loss


def _virtual_rank_switch(context: ParallelContext, stage_ranks: Sequence[int]) -> Callable[[int], None] | None:
    """For stages that go round, tell the context which chunk runs, so that it can say "first" and "last"."""
    num_ranks = max(stage_ranks) + 1
    num_chunks = len(stage_ranks) // num_ranks
    if num_chunks == 1 or list(stage_ranks) != loop_stages(num_ranks, num_chunks):
        return None
    context.set_virtual_pipeline_parallel_size(num_chunks)
    return lambda stage: context.set_virtual_pipeline_parallel_rank(stage // num_ranks)


def _transfer_groups(context: ParallelContext) -> tuple[Any, Any]:
    """The groups of this rank's pipeline for transfers alone: all, and to lower ranks over NCCL. Collective over the world.

    Apart from the pipeline's own group, so that collectives there are counted alike on all ranks, and so that
    descriptions can travel on the CPU beside NCCL.
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
            f"num_microbatches is a whole number from 1 to {_MOST_MICROBATCHES}, not {given!r}", code="C051"
        )
    return given


def _num_arguments(function: Callable[..., Any]) -> int:
    """How many arguments a data_process_func needs: 1 (a batch) or 2 (stage output, micro-batch)."""
    parameters = required_arguments(function)
    if len(parameters) not in (1, 2):
        raise ScheduleError(
            f"data_process_func takes (batch) or (stage_output, micro_batch), not {len(parameters)} arguments",
            code="C051",
        )
    return len(parameters)


@SCHEDULE.register_module
class TableSchedule(PipelineSchedule):
    """Your own order as a table: a CSV file or rows, one per pipeline rank, checked before it runs."""

    def __init__(self, table: TableSource, num_microbatches: int | None = None, **options: Any) -> None:
        super().__init__(num_microbatches, table=table, **options)


def schedule_of(order: str, name: str) -> type[PipelineSchedule]:
    """The schedule of one order as a class, `name(num_microbatches, num_chunks, ...)`, registered for the config."""

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

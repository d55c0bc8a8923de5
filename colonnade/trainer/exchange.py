"""What the ranks tell each other beside training: sums of a few numbers, and whole values of those that have them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.checkpoint.collective import gather_json
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.schedule.transfer.values import Meta, build, describe


def speaks(context: ParallelContext, pipeline: bool = False) -> bool:
    """Whether this rank is the first of those that see the same data; with `pipeline`, of all stages too."""
    here = context.layout.coordinates(context.get_global_rank())
    return all(
        here[axis.name] == 0
        for axis in context.layout.axes
        if axis.data == "same" and (pipeline or axis.mode is not ParallelMode.PIPELINE)
    )


def alone(context: ParallelContext) -> bool:
    """Whether there is nobody to talk to."""
    return not context.is_launched or context.world_size == 1


class Exchange:
    """Adds up a few numbers of the host over the world, without waiting for a device. Collective to make and to use."""

    def __init__(self, context: ParallelContext) -> None:
        self._group = None if alone(context) else _host_group(context)
        self._waits = context.waits

    def start(self, numbers: Sequence[float]) -> Callable[[], list[float]]:
        """Begin to add up; what it returns waits for the sums over all ranks. Collective, in the same order on all."""
        if self._group is None:
            return lambda: list(numbers)
        values = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        work = dist.all_reduce(values, group=self._group, async_op=True)

        def sums() -> list[float]:
            with self._waits.during("waiting for the others beside the steps"):
                work.wait()
            return [float(value) for value in values.tolist()]

        return sums

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """The sums over all ranks. Collective."""
        return self.start(numbers)()


def sum_over_world(values: Tensor, context: ParallelContext) -> Tensor:
    """The sums of a device tensor over all ranks. Collective."""
    if not alone(context):
        dist.all_reduce(values, group=context.get_group(ParallelMode.GLOBAL))
    return values


def gather_values(value: Any, has: bool, context: ParallelContext) -> list[Any]:
    """The nested values of tensors of all ranks that have one, in rank order, on the host of every rank. Collective."""
    note, tensors = describe(value, "what is gathered") if has else ("", [])
    if alone(context):
        return [value] if has else []
    found = []
    for rank, text in enumerate(gather_json(note, context)):
        if text:
            mine = iter(tensors) if rank == context.get_global_rank() else None
            found.append(build(text, partial(_shared, rank, mine, context)))
    return found


def _shared(rank: int, mine: Iterator[Tensor] | None, context: ParallelContext, meta: Meta) -> Tensor:
    """A tensor of `rank`, as bytes: so every type can travel."""
    group = context.get_group(ParallelMode.GLOBAL)
    where = context.device if dist.get_backend(group) == "nccl" else torch.device("cpu")
    if mine is not None:
        value = next(mine).detach().to(where).contiguous()
    else:
        value = torch.empty(meta.shape, dtype=meta.dtype, device=where)
    if value.numel():
        dist.broadcast(value.reshape(-1).view(torch.uint8), rank, group=group)
    return value.cpu()


def _host_group(context: ParallelContext) -> Any:
    """A group whose collectives run on the host: the world's own where that is gloo."""
    world = context.get_group(ParallelMode.GLOBAL)
    return world if dist.get_backend(world) == "gloo" else context.get_second_group(ParallelMode.GLOBAL, "gloo")

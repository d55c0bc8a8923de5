"""Flat buffers: many tensors of one dtype and device, one after another in a single allocation.

Gradient buckets, flat optimizer steps and sharded optimizers all use `FlatLayout`, so that a bucket of gradients, its parameters
and their moments have the same offsets. `FlatShard` and `ShardedOptimizer` are the interface of sharded optimizers to
checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from colonnade.context.layout import Layout
from colonnade.errors import GradientError, PlacementError, listed
from colonnade.parallel.placement import Placement

ALIGN_BYTES = 64
"""Every tensor starts at a multiple of this: a cache line, and enough for 128-bit loads on a GPU."""


@dataclass(frozen=True)
class Span:
    """The position of one tensor: elements [start, start + numel) of the flat buffer."""

    start: int
    numel: int

    @property
    def stop(self) -> int:
        return self.start + self.numel


class FlatLayout:
    """The spans of a list of tensors in one flat buffer; arithmetic only, without memory.

    `views` do not cover the padding between spans, so it stays zero in a buffer that starts as zeros.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        kinds = {(tensor.dtype, tensor.device) for tensor in tensors}
        if len(kinds) != 1:
            found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds)) or "no tensor at all"
            raise GradientError(f"a flat buffer takes tensors of one dtype on one device, but the tensors are: {found}")
        self.dtype, self.device = kinds.pop()
        # Shapes and strides only: references to the tensors would keep alive the memory that they are moved out of.
        self._shapes = [(tensor.shape, _dense_stride(tensor)) for tensor in tensors]
        *starts, self.numel = accumulate((padded(tensor.numel(), self.dtype) for tensor in tensors), initial=0)
        self.spans = [Span(start, tensor.numel()) for start, tensor in zip(starts, tensors, strict=True)]

    def allocate(self, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
        """A zeroed flat buffer of this layout."""
        return torch.zeros(self.numel, dtype=dtype or self.dtype, device=device or self.device)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """One view of `buffer` per tensor, with the tensor's shape and (if dense) its memory format."""
        first = buffer.storage_offset()
        return [
            buffer.as_strided(shape, stride, first + span.start)
            for span, (shape, stride) in zip(self.spans, self._shapes, strict=True)
        ]

    def gaps(self, buffer: Tensor) -> list[Tensor]:
        """Views of the padding in `buffer`: between the spans, and after the last span."""
        stops = [span.stop for span in self.spans]
        starts = [*(span.start for span in self.spans[1:]), buffer.numel()]
        return [buffer[stop:start] for stop, start in zip(stops, starts, strict=True) if start > stop]

    def __len__(self) -> int:
        return len(self.spans)


def padded(stop: int, dtype: torch.dtype) -> int:
    """Round `stop`, the end of a span, up to the end of its padding."""
    step = ALIGN_BYTES // dtype.itemsize
    return -(-stop // step) * step


def flattened(tensor: Tensor) -> Tensor:
    """The elements of a tensor as a 1-d tensor: a view in memory order if the tensor is dense, else a copy."""
    if tensor.is_contiguous():
        return tensor if tensor.dim() == 1 else tensor.view(-1)
    strides = tensor.stride()
    return tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -strides[dim])).reshape(-1)


def view_like(flat: Tensor, like: Tensor) -> Tensor:
    """View a 1-d tensor with the shape of `like`, and with the strides of `like` if `like` is dense (also channels-last)."""
    return flat.as_strided(like.shape, _dense_stride(like), flat.storage_offset())


def _dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The strides of the tensor if it is dense, in any order of dimensions; else those of a contiguous tensor."""
    strides = tensor.stride()
    if not tensor.is_contiguous():
        expected = 1
        for stride, size in sorted((s, n) for s, n in zip(strides, tensor.shape, strict=True) if n > 1):
            if stride != expected:
                return torch.empty(tensor.shape, device="meta").stride()
            expected *= size
    return strides


# --------------------------------------------------------------------------------------------------
# Shards: of a placed tensor, and of a parameter in a sharded optimizer.
#
# `ShardedOptimizer` is the interface of an optimizer with sharded state to checkpoints, in which each rank writes and reads
# only its own elements. `ZeroOptimizer` implements it, and a custom optimizer may.
# --------------------------------------------------------------------------------------------------


MASTER = "master"
"""The name of a master copy in `FlatShard.state`. Only sharded optimizers load it; others have none."""


@dataclass(frozen=True, eq=False)
class FlatShard:
    """Elements [start, stop) of a parameter's local tensor, in memory order, and their optimizer state.

    Args:
        start: The first element.
        stop: The end.
        ranks: The ranks over which the parameter is sharded.
        state: The optimizer state. A 1-d tensor of `stop - start` elements has one value per element; any other value belongs
            to the parameter as a whole. (For a 0-d parameter the shapes do not distinguish the two: all values but `step` are
            loaded as values per element.)
    """

    start: int
    stop: int
    ranks: tuple[int, ...]
    state: dict[str, Any]


@runtime_checkable
class ShardedOptimizer(Protocol):
    """An optimizer whose state is sharded: each rank stores the state of some elements of a parameter. No method is collective.

    `param_groups` contains the model's parameters on every rank, as in torch. Optional attributes:

    - `optimizer_class`: the class of the optimizer that is sharded. Checkpoints can then be loaded into that class, too.
    - `stepped`: the torch optimizer that updates this rank's elements, for `engine.memory()` and `engine.precision_table()`.
    - `masters`: the master weights of `stepped`, for the same two methods.
    """

    param_groups: list[dict[str, Any]]

    def flat_shard(self, parameter: Tensor) -> FlatShard | None:
        """This rank's elements of a parameter and their state; None if this rank has no elements. Valid before the first step, too.

        The shards of `ranks` must cover the parameter exactly once. If several groups of ranks shard the same parameter, the
        state of one group is saved.
        """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict in torch's format. State tensors are 1-d and have this rank's elements, as in `flat_shard`.

        The state dict has no entry for a parameter that has no elements on this rank or no saved state.
        """


def section_runs(sections: Sequence[int], at: int, count: int) -> list[tuple[int, int]]:
    """The position of shard `at` of `count` in a dimension of concatenated sections: (start, length) of the shard's piece of
    each section."""
    runs, start = [], 0
    for length in sections:
        share = length // count
        if length % count:
            raise PlacementError(
                f"sections of {listed(sections)} elements cannot be sharded evenly over {count} ranks. Choose sizes "
                f"that {count} divides, or another number of ranks.",
                code="C032",
            )
        runs.append((start + at * share, share))
        start += length
    return runs


def packed_runs(layout: Layout, placement: Placement, rank: int) -> dict[int, list[tuple[int, int]]]:
    """The position of a rank's shard in each dimension with sections, as (start, length) pairs of `section_runs`."""
    return {
        shard.dim: section_runs(shard.sections, layout.local_rank(mode, rank), len(layout.group_of(mode, rank)))
        for mode, shard in placement.shards.items()
        if shard.sections
    }


def part_indices(layout: Layout, placement: Placement, rank: int) -> dict[int, tuple[int, int]]:
    """The index of a rank's shard in each sharded dimension: {dimension: (index of the shard, number of shards)}.

    If several modes shard a dimension, the first mode is the outermost.
    """
    found: dict[int, tuple[int, int]] = {}
    for mode, shard in placement.shards.items():
        index, count = found.get(shard.dim, (0, 1))
        size = len(layout.group_of(mode, rank))
        found[shard.dim] = (index * size + layout.local_rank(mode, rank), count * size)
    return found

"""Flat buffers: many tensors of one dtype and device, lying one after another in a single allocation.

Gradient buckets, flat optimizer steps and sharded optimizers all use this one description, so that a
bucket of gradients, its parameters and their moments have the same offsets.
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
    """Where one tensor lies: elements [start, start + numel) of the flat buffer."""

    start: int
    numel: int

    @property
    def stop(self) -> int:
        return self.start + self.numel


class FlatLayout:
    """The spans of a list of tensors in one flat buffer; pure arithmetic, owns no memory.

    Padding between spans is never written by `views`, so a buffer that starts as zeros keeps it zero.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.dtype, self.device = _common(tensors)
        # Shapes and strides only: the tensors themselves would keep memory that they are about to leave.
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
        """The padding between the spans of `buffer`, and after the last."""
        stops = [span.stop for span in self.spans]
        starts = [*(span.start for span in self.spans[1:]), buffer.numel()]
        return [buffer[stop:start] for stop, start in zip(stops, starts, strict=True) if start > stop]

    def __len__(self) -> int:
        return len(self.spans)


def padded(stop: int, dtype: torch.dtype) -> int:
    """Where the padding after a span of elements ends."""
    step = ALIGN_BYTES // dtype.itemsize
    return -(-stop // step) * step


def flattened(tensor: Tensor) -> Tensor:
    """The elements as one row: a view when they fill one piece of memory in whatever order, else a copy."""
    if tensor.is_contiguous():
        return tensor if tensor.dim() == 1 else tensor.view(-1)
    strides = tensor.stride()
    return tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -strides[dim])).reshape(-1)


def view_like(flat: Tensor, like: Tensor) -> Tensor:
    """View a 1-d piece with the shape of `like`; dense tensors (channels-last too) keep their strides."""
    return flat.as_strided(like.shape, _dense_stride(like), flat.storage_offset())


def _dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """Its strides if the elements fill one block of memory, in any order of dimensions; else those of a contiguous one."""
    strides = tensor.stride()
    if not tensor.is_contiguous():
        expected = 1
        for stride, size in sorted((s, n) for s, n in zip(strides, tensor.shape, strict=True) if n > 1):
            if stride != expected:
                return torch.empty(tensor.shape, device="meta").stride()
            expected *= size
    return strides


def _common(tensors: Sequence[Tensor]) -> tuple[torch.dtype, torch.device]:
    kinds = {(tensor.dtype, tensor.device) for tensor in tensors}
    if len(kinds) != 1:
        found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds)) or "no tensor at all"
        raise GradientError(f"a flat buffer takes tensors of one dtype on one device, not: {found}")
    return kinds.pop()


# --------------------------------------------------------------------------------------------------
# What one rank has of a whole: its part of a placed tensor, and its elements of a parameter in a sharded optimizer.
#
# `ShardedOptimizer` is all that a checkpoint must know of an optimizer that shares its state among ranks, so that each
# writes and reads just its own elements. `ZeroOptimizer` has it, and an optimizer of yours may.
# --------------------------------------------------------------------------------------------------


MASTER = "master"
"""The name of a master copy in `FlatShard.state`. Only sharded optimizers load it; others have none."""


@dataclass(frozen=True, eq=False)
class FlatShard:
    """Elements [start, stop) of a parameter's local part, in the order they have in memory, and what is kept of them.

    `ranks` share the parameter among themselves. `state` has 1-d tensors of `stop - start` elements, and values that
    are the same for the whole parameter: not tensors, or tensors of another shape. (In a checkpoint the elements of a
    0-d parameter look like such a tensor; all but `step` are loaded as elements.)
    """

    start: int
    stop: int
    ranks: tuple[int, ...]
    state: dict[str, Any]


@runtime_checkable
class ShardedOptimizer(Protocol):
    """An optimizer each of whose ranks keeps the state of some elements of a parameter.

    `param_groups` hold the model's parameters on every rank, as in torch. No method is collective. If it shards another
    optimizer, `optimizer_class` may say which, so that its checkpoints load into that one too. For `engine.memory()` and
    `engine.precision_table()`, `stepped` may be the torch optimizer of this rank's elements, and `masters` its master copies.
    """

    param_groups: list[dict[str, Any]]

    def flat_shard(self, parameter: Tensor) -> FlatShard | None:
        """This rank's elements and all that is kept of them; None for none. Its range is known before the first step.

        The shards of `ranks` must cover the parameter exactly once. Where several teams of ranks share out the same
        parameter, the state of one of them is saved.
        """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take options and state in torch's format, the state as `flat_shard` gave it: 1-d, of this rank's elements.

        A parameter without a shard here, or without saved state, has no entry.
        """


def section_runs(sections: Sequence[int], at: int, count: int) -> list[tuple[int, int]]:
    """Where part `at` of `count` of several sections lies in the whole of them: (start, length) of each section's share."""
    runs, start = [], 0
    for length in sections:
        share = length // count
        if length % count:
            raise PlacementError(
                f"sections of {listed(sections)} elements cannot each be cut evenly into {count} parts; choose sizes that "
                f"{count} divides, or another number of ranks",
                code="C032",
            )
        runs.append((start + at * share, share))
        start += length
    return runs


def packed_runs(layout: Layout, placement: Placement, rank: int) -> dict[int, list[tuple[int, int]]]:
    """For each dimension with sections: where the rank's part lies in the whole, as `section_runs` says."""
    return {
        shard.dim: section_runs(shard.sections, layout.local_rank(mode, rank), len(layout.group_of(mode, rank)))
        for mode, shard in placement.shards.items()
        if shard.sections
    }


def part_indices(layout: Layout, placement: Placement, rank: int) -> dict[int, tuple[int, int]]:
    """For each dimension that is split: (index of the rank's part, number of parts). The first mode cuts first."""
    found: dict[int, tuple[int, int]] = {}
    for mode, shard in placement.shards.items():
        index, count = found.get(shard.dim, (0, 1))
        size = len(layout.group_of(mode, rank))
        found[shard.dim] = (index * size + layout.local_rank(mode, rank), count * size)
    return found

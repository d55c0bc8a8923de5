"""Made-up models for tests of norms: pieces with a whole gradient, and where each rank's part of them lies.

Everything here is arithmetic on a layout: which slice a rank holds is worked out from the placement by the
plain definition (cut the dimension, take the part at my position), not by the library's own code.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from colonnade.context.layout import Layout
from colonnade.context.parallel_mode import ParallelMode
from colonnade.parallel.placement import Placement, Replicate, Shard, Spec, Tied


@dataclass(frozen=True)
class Piece:
    """One tensor of a model: its whole shape, its placement by mode, and what its gradient is like.

    `stage` is the pipeline stage that alone holds it. `parts` gives the lengths of uneven shards by mode;
    otherwise a dimension is cut as `torch.chunk` cuts it. With `mesh`, it is a DTensor over those modes.
    """

    name: str
    shape: tuple[int, ...]
    on: Mapping[str, Spec] = field(default_factory=dict)
    stage: int | None = None
    parts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    mesh: tuple[str, ...] = ()
    dtype: torch.dtype | None = None
    scale: float = 1.0
    frozen: bool = False
    silent: bool = False
    """Takes part in the model, but no loss reaches it: its gradient is None."""

    @property
    def placement(self) -> Placement:
        """As `place` would record it."""
        return Placement({ParallelMode(mode): spec for mode, spec in self.on.items()}, self.shape)


def is_held(piece: Piece, layout: Layout, rank: int) -> bool:
    """Whether the rank is at a stage that has the piece."""
    stage = layout.coordinates(rank)["pipeline"]
    tied = piece.placement.tied
    if tied is not None:
        return stage in tied.stages
    return piece.stage is None or piece.stage == stage


def where(piece: Piece, layout: Layout, rank: int) -> tuple[slice, ...]:
    """The slice of the whole that the rank holds: cut by each shard mode in turn, outermost first."""
    slices = [slice(0, size) for size in piece.shape]
    for name, spec in piece.on.items():
        if isinstance(spec, Shard):
            mode = ParallelMode(name)
            start, length = slices[spec.dim].start, slices[spec.dim].stop - slices[spec.dim].start
            lengths = piece.parts.get(name) or chunked(length, len(layout.group_of(mode, rank)))
            at = layout.local_rank(mode, rank)
            first = start + sum(lengths[:at])
            slices[spec.dim] = slice(first, first + lengths[at])
    return tuple(slices)


def chunked(length: int, count: int) -> tuple[int, ...]:
    """The lengths of `torch.chunk`, with empty parts at the end instead of fewer parts."""
    each = -(-length // count)
    return tuple(max(0, min(each, length - at * each)) for at in range(count))


def whole(piece: Piece, dtype: torch.dtype, *salt: object) -> Tensor:
    """A random whole tensor, the same wherever it is asked for; values as `dtype` (or the piece's own) has them."""
    source = torch.Generator().manual_seed(zlib.crc32(repr((piece.name, salt)).encode()))
    values = piece.scale * torch.randn(piece.shape, generator=source, dtype=torch.float64)
    return values.to(piece.dtype or dtype)


def raw_salt(piece: Piece, layout: Layout, rank: int) -> tuple[tuple[str, int], ...]:
    """Where the rank stands on the axes along which raw gradients differ: those over which a sum is owed."""
    here = layout.coordinates(rank)
    axes = [axis.name for axis in layout.axes if axis.data == "distinct" and not _is_final(piece, axis.mode)]
    if piece.placement.tied is not None:
        axes.append("pipeline")
    salt = [(name, here[name]) for name in axes]
    for name, spec in piece.on.items():
        if isinstance(spec, Replicate) and spec.owes == "sum":
            salt.append((name, layout.local_rank(ParallelMode(name), rank)))
    return tuple(salt)


def _is_final(piece: Piece, mode: ParallelMode) -> bool:
    """Whether the gradient comes reduced over the mode: as placed, or because a DTensor does that by itself."""
    spec = piece.placement.on(mode)
    return mode.value in piece.mesh or (not isinstance(spec, Tied) and spec.owes == "nothing")


def norm_of(tensors: Iterable[Tensor], p: float) -> float:
    """The norm of everything at once, in fp64 in this process: the truth."""
    values = torch.cat([torch.zeros(1, dtype=torch.float64), *(tensor.double().flatten() for tensor in tensors)]).abs()
    if math.isinf(p):
        return float(values.max())
    largest = float(values.max()) or 1.0
    return float((values / largest).pow(p).sum().pow(1.0 / p)) * largest


def counted(pieces: Sequence[Piece], dtype: torch.dtype, *salt: object) -> list[Tensor]:
    """The whole gradients that a norm is over."""
    return [whole(piece, dtype, *salt) for piece in pieces if not piece.frozen and not piece.silent]

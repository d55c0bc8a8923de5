"""Spread: how an activation lies on the modes, and the way from one spread to another.

A placement is of a parameter; a spread is of the tensors between layers, [batch, sequence, hidden]: which mode
splits which of the three.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import PlacementError
from colonnade.parallel import collectives
from colonnade.parallel.placement import Replicate, Shard, Spec


@dataclass(frozen=True)
class Spread:
    """The mode that splits each dimension of an activation; None where it is whole."""

    batch: ParallelMode | None = None
    sequence: ParallelMode | None = None
    hidden: ParallelMode | None = None

    @property
    def modes(self) -> tuple[ParallelMode, ...]:
        """The modes that split anything."""
        return tuple(mode for mode in (self.batch, self.sequence, self.hidden) if mode is not None)

    def along_hidden(self) -> dict[ParallelMode, Spec]:
        """The placement of a parameter that lies along the hidden dimension: a bias, the weight of a norm.

        Each rank sees a part of the batch and of the sequence, so over those modes its gradient owes a sum.
        """
        placed: dict[ParallelMode, Spec] = {self.hidden: Shard(-1)} if self.hidden is not None else {}
        for mode in (self.batch, self.sequence):
            if mode is not None:
                placed[mode] = Replicate(owes="sum")
        return placed


Dims = tuple[int | None, int | None, int | None]
"""Where batch, sequence and hidden are in a tensor; None where it has no such dimension."""

ACTIVATION: Dims = (0, -2, -1)


@dataclass(frozen=True)
class Width:
    """How the hidden dimension is cut: a whole of `features`, in multiples of `unit`, into parts that may be uneven."""

    features: int | None = None
    unit: int = 1
    uneven: bool = False


EQUAL = Width()


def scatter(
    x: Tensor, spread: Spread, context: ParallelContext, dims: Dims = ACTIVATION, width: Width = EQUAL
) -> Tensor:
    """This rank's part of a whole x. Backward joins everybody's gradient."""
    for mode, dim, name in _split_dims(spread, dims):
        how = width if name == "hidden" else EQUAL
        sizes = cut(x.shape[dim], mode, context, name, how.unit, not how.uneven)
        x = collectives.scatter(x, mode, dim, sizes, context=context)
    return x


def gather(
    x: Tensor, spread: Spread, context: ParallelContext, dims: Dims = ACTIVATION, width: Width = EQUAL
) -> Tensor:
    """The whole of an x of this spread, on every rank. Backward takes this rank's part of the gradient."""
    for mode, dim, name in _split_dims(spread, dims):
        sizes = (x.shape[dim],) * size_of(mode, context)
        if name == "hidden" and width.features is not None:
            sizes = cut(width.features, mode, context, name, width.unit, not width.uneven)
        x = collectives.gather(x, mode, dim, sizes, context=context)
    return x


def respread(x: Tensor, source: Spread, target: Spread, context: ParallelContext, width: Width = EQUAL) -> Tensor:
    """From one spread to another: what lies elsewhere is gathered and split anew."""
    pairs = list(zip(_each(source), _each(target), strict=True))
    leave = Spread(*(old if old is not new else None for old, new in pairs))
    enter = Spread(*(new if old is not new else None for old, new in pairs))
    return scatter(gather(x, leave, context, ACTIVATION, width), enter, context, ACTIVATION, width)


def cut(
    length: int, mode: ParallelMode, context: ParallelContext, what: str, unit: int = 1, even: bool = True
) -> tuple[int, ...]:
    """The lengths of the parts over a mode; refuses what cannot be cut (evenly, in multiples of `unit`)."""
    ranks = size_of(mode, context)
    pieces = f"{length // unit} x {unit}" if unit > 1 else f"{length}"
    if length % unit or (even and (length // unit) % ranks):
        raise PlacementError(
            f"{what} of size {pieces} cannot be cut evenly over the {ranks} ranks of {mode}; "
            f"choose a size that {ranks} divides, or another tensor size",
            code="C032",
        )
    return collectives.split_sizes(length, mode, unit, context=context)


def size_of(mode: ParallelMode, context: ParallelContext) -> int:
    """How many ranks a mode has here; one where it has no group."""
    return context.get_world_size(mode) if context.is_initialized(mode) else 1


def _split_dims(spread: Spread, dims: Dims) -> Iterator[tuple[ParallelMode, int, str]]:
    """(mode, dimension, name) of what is split and there."""
    for mode, dim, name in zip(_each(spread), dims, ("batch", "sequence", "hidden"), strict=True):
        if mode is not None and dim is not None:
            yield mode, dim, name


def _each(spread: Spread) -> tuple[ParallelMode | None, ParallelMode | None, ParallelMode | None]:
    return spread.batch, spread.sequence, spread.hidden

"""Collectives with gradients: what a rank sends in forward has its transpose in backward.

| function | forward | backward |
|---|---|---|
| `copy` | as it is | sum over the mode |
| `reduce` | sum over the mode | as it is |
| `gather` | everybody's parts, joined | this rank's part |
| `scatter` | this rank's part | everybody's parts, joined |
| `all_gather` | everybody's parts, joined | sum over the mode, this rank's part of it |
| `reduce_scatter` | sum over the mode, this rank's part of it | everybody's parts, joined |
| `all_to_all` | rows to the ranks they are for | rows back to where they came from |
| `ring` | to the next rank, from the previous one | back |

Backward is written with these functions themselves, so it can be differentiated again. Where the mode has
one rank, or no group here, every one of them gives back what it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function

from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.core import global_context
from colonnade.errors import PlacementError
from colonnade.parallel.collectives import wire
from colonnade.parallel.collectives.wire import Call, Members, members_of, recorded

__all__ = [
    "Call",
    "Members",
    "all_gather",
    "all_to_all",
    "copy",
    "gather",
    "linear_map",
    "members_of",
    "recorded",
    "reduce",
    "reduce_scatter",
    "ring",
    "scatter",
    "split_sizes",
]

Map = Callable[[Tensor], Tensor]


class _Transposed(Function):
    """A linear map over a group: `run` in forward, its `transpose` (a function of this file) in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Map, transpose: Map) -> Tensor:
        ctx.transpose = transpose
        return run(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.transpose(gradient), None, None


def copy(x: Tensor, mode: ParallelMode, *, context: ParallelContext | None = None) -> Tensor:
    """Forward: x as it is. Backward: the sum of everybody's gradient. For a whole x that each rank uses in part."""
    members = members_of(mode, context or global_context)
    if members is None:
        return x
    return linear_map(x, lambda whole: whole.view_as(whole), lambda gradient: reduce(gradient, mode, context=context))


def reduce(x: Tensor, mode: ParallelMode, *, context: ParallelContext | None = None) -> Tensor:
    """Forward: the sum of everybody's x. Backward: the gradient as it is. For partial results made whole."""
    members = members_of(mode, context or global_context)
    if members is None:
        return x
    return linear_map(
        x, lambda part: wire.all_reduce(part, members), lambda gradient: copy(gradient, mode, context=context)
    )


def gather(
    x: Tensor,
    mode: ParallelMode,
    dim: int = -1,
    sizes: Sequence[int] | None = None,
    *,
    context: ParallelContext | None = None,
) -> Tensor:
    """Forward: everybody's parts joined along dim. Backward: my part, the gradient being the same everywhere.

    `sizes` are the lengths of the parts along dim; left out, the ranks ask each other, which waits for them.
    """
    return _along(x, mode, dim, sizes, context, _lengths, wire.all_gather, scatter)


def scatter(
    x: Tensor,
    mode: ParallelMode,
    dim: int = -1,
    sizes: Sequence[int] | None = None,
    *,
    context: ParallelContext | None = None,
) -> Tensor:
    """Forward: my part of x along dim, x being the same everywhere. Backward: everybody's gradient, joined.

    `sizes` are the lengths of the parts; left out, they are as even as they can be (`split_sizes`).
    """
    return _along(x, mode, dim, sizes, context, _shares, wire.own_part, gather)


def all_gather(
    x: Tensor,
    mode: ParallelMode,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    *,
    context: ParallelContext | None = None,
) -> Tensor:
    """Forward: everybody's parts joined along dim. Backward: the sum of everybody's gradient, my part of it.

    For parts that each rank then uses in its own way. `sizes` as in `gather`.
    """
    return _along(x, mode, dim, sizes, context, _lengths, wire.all_gather, reduce_scatter)


def reduce_scatter(
    x: Tensor,
    mode: ParallelMode,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    *,
    context: ParallelContext | None = None,
) -> Tensor:
    """Forward: the sum of everybody's x, my part of it along dim. Backward: everybody's gradient, joined.

    `sizes` as in `scatter`.
    """
    return _along(x, mode, dim, sizes, context, _shares, wire.reduce_scatter, all_gather)


def all_to_all(
    x: Tensor,
    mode: ParallelMode,
    send_sizes: Sequence[int] | None = None,
    receive_sizes: Sequence[int] | None = None,
    *,
    context: ParallelContext | None = None,
) -> Tensor:
    """Forward: send_sizes[i] rows of x to local rank i, in order, and theirs in turn. Backward: the way back.

    Without sizes every rank gets an equal share. Without receive_sizes the ranks ask each other first.
    """
    members = members_of(mode, context or global_context)
    if members is None:
        return x
    if send_sizes is None and len(x) % members.size:
        raise PlacementError(
            f"{len(x)} rows cannot be shared evenly among the {members.size} ranks of {members.mode}; give send_sizes"
        )
    send = _shares(x, 0, send_sizes, members)
    receive = _arrivals(x, send, send_sizes, receive_sizes, members)
    return linear_map(
        x,
        lambda rows: wire.all_to_all(rows, members, send, receive),
        lambda gradient: all_to_all(gradient, mode, receive, send, context=context),
    )


def ring(
    x: Tensor,
    mode: ParallelMode,
    shift: int = 1,
    receive_shape: Sequence[int] | None = None,
    *,
    context: ParallelContext | None = None,
) -> Tensor:
    """Forward: x to the rank `shift` places ahead, its likes from as far behind. Backward: the same way back.

    `receive_shape` is given where it differs from x's own.
    """
    members = members_of(mode, context or global_context)
    if members is None or shift % members.size == 0:
        return x
    sent, arrives = tuple(x.shape), tuple(receive_shape if receive_shape is not None else x.shape)
    return linear_map(
        x,
        lambda mine: wire.ring(mine, members, shift, arrives),
        lambda gradient: ring(gradient, mode, -shift, sent, context=context),
    )


def split_sizes(
    whole: int, mode: ParallelMode, unit: int = 1, *, context: ParallelContext | None = None
) -> tuple[int, ...]:
    """The lengths of `whole` cut over the ranks of a mode in multiples of `unit`, the first ones longer by one."""
    members = members_of(mode, context or global_context)
    return _cut(whole, 1 if members is None else members.size, unit)


def _cut(whole: int, parts: int, unit: int = 1) -> tuple[int, ...]:
    if whole % unit:
        raise PlacementError(f"{whole} cannot be cut in multiples of {unit}")
    each, longer = divmod(whole // unit, parts)
    return tuple((each + (at < longer)) * unit for at in range(parts))


def linear_map(x: Tensor, run: Map, transpose: Map) -> Tensor:
    """`run(x)`, a linear map; the gradient is its `transpose`, which is made of functions with gradients itself."""
    return _Transposed.apply(x, run, transpose)


def _along(
    x: Tensor,
    mode: ParallelMode,
    dim: int,
    sizes: Sequence[int] | None,
    context: ParallelContext | None,
    lengths_of: Callable[[Tensor, int, Sequence[int] | None, Members], tuple[int, ...]],
    run: Callable[[Tensor, Members, int, Sequence[int]], Tensor],
    transpose: Callable[..., Tensor],
) -> Tensor:
    """`run` on parts along a dimension, whose lengths `lengths_of` finds; `transpose` in backward."""
    members = members_of(mode, context or global_context)
    if members is None:
        return x
    at = _dimension(x, dim)
    lengths = lengths_of(x, at, sizes, members)
    return linear_map(
        x,
        lambda value: run(value, members, at, lengths),
        lambda gradient: transpose(gradient, mode, at, lengths, context=context),
    )


def _dimension(x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise PlacementError(f"dimension {dim} of a tensor of shape {tuple(x.shape)}: it has 0 to {x.dim() - 1}")
    return dim % x.dim()


def _lengths(x: Tensor, dim: int, sizes: Sequence[int] | None, members: Members) -> tuple[int, ...]:
    """The parts' lengths where each rank knows its own."""
    if sizes is None:
        return tuple(row[0] for row in wire.numbers_of_all([x.shape[dim]], members, x.device))
    lengths = _counted(sizes, members)
    if lengths[members.at] != x.shape[dim]:
        raise PlacementError(
            f"sizes={list(lengths)} over {members.mode} give this rank {lengths[members.at]} along dimension {dim}, "
            f"but its tensor has the shape {tuple(x.shape)}"
        )
    return lengths


def _shares(x: Tensor, dim: int, sizes: Sequence[int] | None, members: Members) -> tuple[int, ...]:
    """The parts' lengths where each rank knows the whole."""
    whole = x.shape[dim]
    lengths = _cut(whole, members.size) if sizes is None else _counted(sizes, members)
    if sum(lengths) != whole:
        raise PlacementError(
            f"sizes={list(lengths)} over {members.mode} add up to {sum(lengths)}, but dimension {dim} of a tensor of "
            f"shape {tuple(x.shape)} has {whole}"
        )
    return lengths


def _arrivals(
    x: Tensor, send: Sequence[int], given: Sequence[int] | None, receive: Sequence[int] | None, members: Members
) -> tuple[int, ...]:
    if receive is not None:
        return _counted(receive, members)
    if given is None:
        return tuple(send)
    return tuple(row[members.at] for row in wire.numbers_of_all(send, members, x.device))


def _counted(sizes: Sequence[int], members: Members) -> tuple[int, ...]:
    lengths = tuple(int(size) for size in sizes)
    if len(lengths) != members.size or min(lengths) < 0:
        raise PlacementError(
            f"sizes={list(lengths)}: {members.mode} has {members.size} ranks, so give that many lengths"
        )
    return lengths

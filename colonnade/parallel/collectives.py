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
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from colonnade.comm.torch_versions import is_wanted
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.core import global_context
from colonnade.errors import PlacementError
from colonnade.parallel import wire
from colonnade.parallel.wire import Call, Members, members_of, recorded

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


# --------------------------------------------------------------------------------------------------
# Affine maps with a split weight, together with their collectives: one node of the autograd graph each.
#
# So a collective of the backward pass runs while the gradient of the weight is computed, sums are made in place, and the
# bias is added inside the product. Of the gradients only those are computed that the pass is for (a backward pass may be
# in two parts). A backward pass that is differentiated again is made of the plain functions with gradients instead.
# --------------------------------------------------------------------------------------------------


class Way(NamedTuple):
    """How activations come from between blocks into one, and back: over which ranks, and cut along which dimension."""

    members: Members
    dim: int | None
    """None where activations between blocks are whole."""
    enter: Callable[[Tensor], Tensor]
    """Whole in forward, the sum in backward; with gradients. `leave` is its transpose."""
    leave: Callable[[Tensor], Tensor]

    def whole(self, x: Tensor) -> Tensor:
        """`enter` without gradients."""
        if self.dim is None:
            return x
        return wire.all_gather(x, self.members, self.dim, (x.shape[self.dim],) * self.members.size)

    def begin_sum(self, x: Tensor) -> Callable[[], Tensor]:
        """`leave` without gradients, begun; call the result for the sum. Uses x up."""
        if self.dim is None:
            return wire.begin_all_reduce(x, self.members)
        length = x.shape[self.dim] // self.members.size
        return wire.begin_reduce_scatter(x, self.members, self.dim, (length,) * self.members.size)


def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None, way: Way) -> Tensor:
    """x A^T + b with this rank's rows of A and b, for an x that enters: linear(way.enter(x), A, b)."""
    return _Column.apply(x, weight, bias, way)


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None, way: Way) -> Tensor:
    """x A^T with this rank's columns of A, which leaves, and the whole b: way.leave(linear(x, A)) + b."""
    return _Row.apply(x, weight, bias, way)


class _Column(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, way: Way) -> Tensor:
        ctx.way = way
        dtype = _dtype(x)
        whole, matrix = way.whole(x.to(dtype)), weight.to(dtype)
        ctx.save_for_backward(x, weight, whole, matrix)
        return F.linear(whole, matrix, None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, whole, matrix = ctx.saved_tensors
        begin_sum: Callable[[Tensor], Callable[[], Tensor]] = ctx.way.begin_sum
        if torch.is_grad_enabled():
            whole, matrix = ctx.way.enter(x.to(gradient.dtype)), weight.to(gradient.dtype)
            begin_sum = lambda value: lambda: ctx.way.leave(value)  # noqa: E731
        wants_x, wants_weight, wants_bias = _wants(ctx)
        summed = begin_sum(gradient.matmul(matrix)) if wants_x else None
        by_weight = _by_weight(gradient, whole) if wants_weight else None
        by_bias = _rows(gradient).sum(0) if wants_bias else None
        return None if summed is None else summed(), by_weight, by_bias, None


class _Row(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, way: Way) -> Tensor:
        ctx.way = way
        dtype = _dtype(x)
        rows, matrix = x.to(dtype), weight.to(dtype)
        ctx.save_for_backward(x, weight, rows, matrix)
        # One rank adds the bias, so that the sum has it once.
        added = bias.to(dtype) if bias is not None and way.members.at == 0 else None
        return way.begin_sum(F.linear(rows, matrix, added))()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, rows, matrix = ctx.saved_tensors
        enter = ctx.way.whole
        if torch.is_grad_enabled():
            rows, matrix, enter = x.to(gradient.dtype), weight.to(gradient.dtype), ctx.way.enter
        wants_x, wants_weight, wants_bias = _wants(ctx)
        by_bias = _rows(gradient).sum(0) if wants_bias else None
        whole = enter(gradient) if wants_x or wants_weight else gradient
        by_weight = _by_weight(whole, rows) if wants_weight else None
        return whole.matmul(matrix) if wants_x else None, by_weight, by_bias, None


def _by_weight(gradient: Tensor, x: Tensor) -> Tensor:
    return _rows(gradient).t().mm(_rows(x))


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2)


def _wants(ctx: Any) -> list[bool]:
    """For x, weight and bias, whether this pass is for its gradient."""
    nodes = [node for node, _ in ctx.next_functions]  # none for a bias that is not there
    return [needed and is_wanted(nodes[at]) for at, needed in enumerate(ctx.needs_input_grad[:3])]


def _dtype(x: Tensor) -> torch.dtype:
    """The dtype of a product: that of x, or as autocast has it."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype

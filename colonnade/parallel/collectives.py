"""Differentiable collectives over the group of a mode: backward is the transpose of forward.

| function | forward | backward |
|---|---|---|
| `copy` | identity | all-reduce |
| `reduce` | all-reduce | identity |
| `gather` | all-gather | this rank's shard |
| `scatter` | this rank's shard | all-gather |
| `all_gather` | all-gather | reduce-scatter |
| `reduce_scatter` | reduce-scatter | all-gather |
| `all_to_all` | all-to-all of rows | all-to-all in the opposite direction |
| `ring` | send to the next rank, receive from the previous one | the opposite direction |

The names are not those of torch.distributed: `reduce` is an all-reduce, and `gather` and `scatter` have no root rank. `gather` and
`all_gather` (and their transposes) differ in backward only: use `gather` if all ranks use the result alike, `all_gather` if each
rank uses it in its own way.

Backward consists of these functions themselves, so it can be differentiated again. If the mode has a single rank, or no group
on this rank, every function returns its input.
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
    """A linear map over a group: `run` in forward, its `transpose` in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Map, transpose: Map) -> Tensor:
        ctx.transpose = transpose
        return run(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.transpose(gradient), None, None


def copy(x: Tensor, mode: ParallelMode, *, context: ParallelContext | None = None) -> Tensor:
    """Identity in forward, all-reduce of the gradient in backward.

    Use it if every rank computes a part of the result from the same `x`. Collective over the ranks of `mode`, in backward.

    Args:
        x: A tensor that is equal on all ranks.
        mode: The mode.
        context: The parallel context; None for the global one.
    """
    members = members_of(mode, context or global_context)
    if members is None:
        return x
    return linear_map(x, lambda value: value.view_as(value), lambda gradient: reduce(gradient, mode, context=context))


def reduce(x: Tensor, mode: ParallelMode, *, context: ParallelContext | None = None) -> Tensor:
    """All-reduce (sum) in forward, identity in backward.

    Use it for partial results, if all ranks use the sum in the same way. Collective over the ranks of `mode`, in forward.

    Args:
        x: A tensor of the same shape on all ranks.
        mode: The mode.
        context: The parallel context; None for the global one.
    """
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
    """All-gather along `dim` in forward; this rank's shard of the gradient in backward.

    The gradient must be equal on all ranks, so all must use the result alike; else use `all_gather`. Collective over the ranks
    of `mode`, in forward.

    Args:
        x: This rank's shard.
        mode: The mode.
        dim: The dimension to concatenate along.
        sizes: Lengths of all ranks' shards along `dim`. None: the ranks exchange them, and the host waits.
        context: The parallel context; None for the global one.
    """
    return _along(x, mode, dim, sizes, context, _lengths_of_shards, wire.all_gather, scatter)


def scatter(
    x: Tensor,
    mode: ParallelMode,
    dim: int = -1,
    sizes: Sequence[int] | None = None,
    *,
    context: ParallelContext | None = None,
) -> Tensor:
    """This rank's shard of `x` along `dim` in forward; all-gather of the gradients in backward.

    Collective over the ranks of `mode`, in backward.

    Args:
        x: A tensor that is equal on all ranks.
        mode: The mode.
        dim: The dimension to split.
        sizes: Lengths of all ranks' shards along `dim`. None: as even as possible (`split_sizes`).
        context: The parallel context; None for the global one.
    """
    return _along(x, mode, dim, sizes, context, _lengths_of_split, wire.own_part, gather)


def all_gather(
    x: Tensor,
    mode: ParallelMode,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    *,
    context: ParallelContext | None = None,
) -> Tensor:
    """All-gather along `dim` in forward; reduce-scatter of the gradients in backward.

    Use it if the ranks use the concatenated tensor in different ways; otherwise `gather` needs no communication in backward.
    Collective over the ranks of `mode`, in forward and backward.

    Args:
        x: This rank's shard.
        mode: The mode.
        dim: The dimension to concatenate along.
        sizes: Lengths of all ranks' shards along `dim`. None: the ranks exchange them, and the host waits.
        context: The parallel context; None for the global one.
    """
    return _along(x, mode, dim, sizes, context, _lengths_of_shards, wire.all_gather, reduce_scatter)


def reduce_scatter(
    x: Tensor,
    mode: ParallelMode,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    *,
    context: ParallelContext | None = None,
) -> Tensor:
    """Reduce-scatter (sum) along `dim` in forward; all-gather of the gradients in backward.

    Collective over the ranks of `mode`, in forward and backward.

    Args:
        x: A tensor of the same shape on all ranks.
        mode: The mode.
        dim: The dimension to split.
        sizes: Lengths of all ranks' shards along `dim`. None: as even as possible (`split_sizes`).
        context: The parallel context; None for the global one.
    """
    return _along(x, mode, dim, sizes, context, _lengths_of_split, wire.reduce_scatter, all_gather)


def all_to_all(
    x: Tensor,
    mode: ParallelMode,
    send_sizes: Sequence[int] | None = None,
    receive_sizes: Sequence[int] | None = None,
    *,
    context: ParallelContext | None = None,
) -> Tensor:
    """All-to-all of the rows of `x`; backward sends the gradients in the opposite direction.

    Collective over the ranks of `mode`, in forward and backward.

    Args:
        x: The rows to send, sorted by destination.
        mode: The mode.
        send_sizes: Number of rows for each rank. None: equal numbers.
        receive_sizes: Number of rows from each rank. None: the ranks exchange them, and the host waits, unless `send_sizes` is
            None, too.
        context: The parallel context; None for the global one.

    Returns:
        The received rows, by origin.
    """
    members = members_of(mode, context or global_context)
    if members is None:
        return x
    if send_sizes is None and len(x) % members.size:
        raise PlacementError(
            f"{len(x)} rows cannot be divided evenly among the {members.size} ranks of {members.mode}. Pass send_sizes."
        )
    send = _lengths_of_split(x, 0, send_sizes, members)
    if receive_sizes is not None:
        receive = _counted(receive_sizes, members)
    elif send_sizes is None:
        receive = send
    else:
        receive = tuple(row[members.at] for row in wire.numbers_of_all(send, members, x.device))
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
    """Send `x` `shift` ranks ahead in the group and receive from `shift` ranks behind; backward sends in the opposite direction.

    Collective over the ranks of `mode`, in forward and backward.

    Args:
        x: The tensor to send.
        mode: The mode.
        shift: The distance in the group.
        receive_shape: The shape of the received tensor, if it differs from that of `x`.
        context: The parallel context; None for the global one.
    """
    members = members_of(mode, context or global_context)
    if members is None or shift % members.size == 0:
        return x
    sent, arrives = tuple(x.shape), tuple(receive_shape if receive_shape is not None else x.shape)
    return linear_map(
        x,
        lambda value: wire.ring(value, members, shift, arrives),
        lambda gradient: ring(gradient, mode, -shift, sent, context=context),
    )


def split_sizes(
    whole: int, mode: ParallelMode, unit: int = 1, *, context: ParallelContext | None = None
) -> tuple[int, ...]:
    """Split `whole` elements over the ranks of a mode, as evenly as multiples of `unit` allow; the first ranks get more.

    Args:
        whole: The number of elements to split.
        mode: The mode.
        unit: The number of elements that must stay together, such as the head size.
        context: The parallel context; None for the global one.

    Returns:
        The length on each rank of the mode.

    Raises:
        PlacementError: `whole` is no multiple of `unit`.
    """
    members = members_of(mode, context or global_context)
    return _even_sizes(whole, 1 if members is None else members.size, unit)


def _even_sizes(total: int, count: int, unit: int = 1) -> tuple[int, ...]:
    if total % unit:
        raise PlacementError(f"{total} cannot be split in multiples of {unit}")
    least, longer = divmod(total // unit, count)
    return tuple((least + (at < longer)) * unit for at in range(count))


def linear_map(x: Tensor, run: Map, transpose: Map) -> Tensor:
    """Apply the linear map `run` to `x`, with `transpose` as its backward function.

    Args:
        x: The input.
        run: The map; its operations are not recorded by autograd.
        transpose: Maps the gradient of the output to the gradient of `x`. It must consist of differentiable functions, for double
            backward.
    """
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
    """A linear map on shards along a dimension, whose lengths `lengths_of` determines."""
    members = members_of(mode, context or global_context)
    if members is None:
        return x
    if not -x.dim() <= dim < x.dim():
        raise PlacementError(
            f"dimension {dim} does not exist in a tensor of shape {tuple(x.shape)}; allowed are 0 to {x.dim() - 1}"
        )
    at = dim % x.dim()
    lengths = lengths_of(x, at, sizes, members)
    return linear_map(
        x,
        lambda value: run(value, members, at, lengths),
        lambda gradient: transpose(gradient, mode, at, lengths, context=context),
    )


def _lengths_of_shards(x: Tensor, dim: int, sizes: Sequence[int] | None, members: Members) -> tuple[int, ...]:
    """The lengths of the shards of all ranks; x is the shard of this rank."""
    if sizes is None:
        return tuple(row[0] for row in wire.numbers_of_all([x.shape[dim]], members, x.device))
    lengths = _counted(sizes, members)
    if lengths[members.at] != x.shape[dim]:
        raise PlacementError(
            f"sizes={list(lengths)} over {members.mode} give this rank {lengths[members.at]} elements along "
            f"dimension {dim}, but its tensor has the shape {tuple(x.shape)}"
        )
    return lengths


def _lengths_of_split(x: Tensor, dim: int, sizes: Sequence[int] | None, members: Members) -> tuple[int, ...]:
    """The lengths of the shards that the full tensor x is split into."""
    total = x.shape[dim]
    lengths = _even_sizes(total, members.size) if sizes is None else _counted(sizes, members)
    if sum(lengths) != total:
        raise PlacementError(
            f"sizes={list(lengths)} over {members.mode} add up to {sum(lengths)}, but dimension {dim} of a tensor of "
            f"shape {tuple(x.shape)} has {total}"
        )
    return lengths


def _counted(sizes: Sequence[int], members: Members) -> tuple[int, ...]:
    lengths = tuple(int(size) for size in sizes)
    if len(lengths) != members.size or min(lengths) < 0:
        raise PlacementError(
            f"sizes is {list(lengths)}, but {members.mode} has {members.size} ranks. Pass one length for each rank."
        )
    return lengths


# --------------------------------------------------------------------------------------------------
# Linear layers with a sharded weight, together with their collectives: a single node of the autograd graph each.
#
# So a collective of the backward pass overlaps with the gradient of the weight, sums are in place, and the bias is added inside
# the product. Only the gradients that the pass needs are computed (a pipeline may split backward into two passes, for inputs
# and for weights). For double backward, the differentiable functions above are used instead.
# --------------------------------------------------------------------------------------------------


class Way(NamedTuple):
    """The collectives at the start (`enter`) and end (`leave`) of a tensor-parallel block: their ranks, and the dimension
    along which activations are sharded between blocks."""

    members: Members
    dim: int | None
    """None if activations between blocks are replicated."""
    enter: Callable[[Tensor], Tensor]
    """The full activations in forward, the sum in backward; differentiable. `leave` is its transpose."""
    leave: Callable[[Tensor], Tensor]

    def whole(self, x: Tensor) -> Tensor:
        """The output of `enter`, computed without autograd."""
        if self.dim is None:
            return x
        return wire.all_gather(x, self.members, self.dim, (x.shape[self.dim],) * self.members.size)

    def begin_sum(self, x: Tensor) -> Callable[[], Tensor]:
        """Start the reduction of `leave` without autograd, in place on `x`.

        Returns a function that waits for the sum and returns it.
        """
        if self.dim is None:
            return wire.begin_all_reduce(x, self.members)
        length = x.shape[self.dim] // self.members.size
        return wire.begin_reduce_scatter(x, self.members, self.dim, (length,) * self.members.size)


def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None, way: Way) -> Tensor:
    """Column-parallel linear layer: linear(way.enter(x), weight, bias), with this rank's rows of the weight and the bias."""
    return _Column.apply(x, weight, bias, way)


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None, way: Way) -> Tensor:
    """Row-parallel linear layer: way.leave(linear(x, weight)) + bias, with this rank's columns of the weight and the full bias."""
    return _Row.apply(x, weight, bias, way)


class _Column(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, way: Way) -> Tensor:
        ctx.way = way
        dtype = _dtype(x)
        full, matrix = way.whole(x.to(dtype)), weight.to(dtype)
        ctx.save_for_backward(x, weight, full, matrix)
        return F.linear(full, matrix, None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, full, matrix = ctx.saved_tensors
        begin_sum: Callable[[Tensor], Callable[[], Tensor]] = ctx.way.begin_sum
        if torch.is_grad_enabled():  # double backward
            full, matrix = ctx.way.enter(x.to(gradient.dtype)), weight.to(gradient.dtype)
            begin_sum = lambda value: lambda: ctx.way.leave(value)  # noqa: E731
        wants_x, wants_weight, wants_bias = _wants(ctx)
        # The sum over ranks overlaps with the gradient of the weight.
        summed = begin_sum(gradient.matmul(matrix)) if wants_x else None
        by_weight = _by_weight(gradient, full) if wants_weight else None
        by_bias = _rows(gradient).sum(0) if wants_bias else None
        return None if summed is None else summed(), by_weight, by_bias, None


class _Row(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, way: Way) -> Tensor:
        ctx.way = way
        dtype = _dtype(x)
        rows, matrix = x.to(dtype), weight.to(dtype)
        ctx.save_for_backward(x, weight, rows, matrix)
        # Only one rank adds the bias, so that it is in the sum once.
        added = bias.to(dtype) if bias is not None and way.members.at == 0 else None
        return way.begin_sum(F.linear(rows, matrix, added))()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, rows, matrix = ctx.saved_tensors
        enter = ctx.way.whole
        if torch.is_grad_enabled():  # double backward
            rows, matrix, enter = x.to(gradient.dtype), weight.to(gradient.dtype), ctx.way.enter
        wants_x, wants_weight, wants_bias = _wants(ctx)
        by_bias = _rows(gradient).sum(0) if wants_bias else None
        full = enter(gradient) if wants_x or wants_weight else gradient
        by_weight = _by_weight(full, rows) if wants_weight else None
        return full.matmul(matrix) if wants_x else None, by_weight, by_bias, None


def _by_weight(gradient: Tensor, x: Tensor) -> Tensor:
    return _rows(gradient).t().mm(_rows(x))


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2)


def _wants(ctx: Any) -> list[bool]:
    """For x, weight and bias, whether this pass needs its gradient."""
    nodes = [node for node, _ in ctx.next_functions]  # without an entry for a missing bias
    return [needed and is_wanted(nodes[at]) for at, needed in enumerate(ctx.needs_input_grad[:3])]


def _dtype(x: Tensor) -> torch.dtype:
    """The dtype of a product: the autocast dtype if autocast is on, else the dtype of x."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype

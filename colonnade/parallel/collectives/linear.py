"""Affine maps with a split weight, together with their collectives: one node of the autograd graph each.

So a collective of the backward pass runs while the gradient of the weight is computed, sums are made in place, and the
bias is added inside the product. Of the gradients only those are computed that the pass is for (a backward pass may be
in two parts). A backward pass that is differentiated again is made of the plain functions with gradients instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from colonnade.comm.torch_versions import is_wanted
from colonnade.parallel.collectives import wire
from colonnade.parallel.collectives.wire import Members


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

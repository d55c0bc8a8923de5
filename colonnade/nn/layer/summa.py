"""SUMMA: products of matrices that lie as blocks on a square of ranks, in three forms that differentiate into each other.

On a q x q square, rank (i, j) has block (i, j) of every matrix; i is its place in the column group, j in the row
group. Only blocks are kept for backward: panels travel again, so memory stays 1/q^2 of the matrices.

| product | travels along rows | travels along columns | gradients |
|---|---|---|---|
| `ab`: A B | A, broadcast | B, broadcast | `abt(g, B)`, `atb(A, g)` |
| `abt`: A B^T | the result, reduced | B, broadcast | `ab(g, B)`, `atb(g, A)` |
| `atb`: A^T B | A, broadcast | the result, reduced | `abt(B, g)`, `ab(A, g)` |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd import Function

from colonnade.parallel.collectives import wire
from colonnade.parallel.collectives.wire import Members


@dataclass(frozen=True)
class Square:
    """This rank's row and column of the square."""

    row: Members
    col: Members

    @property
    def q(self) -> int:
        return self.row.size


class _AB(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, square: Square) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.square = square
        total = None
        for at in range(square.q):
            part = wire.broadcast(a, square.row, at, a.shape) @ wire.broadcast(b, square.col, at, b.shape)
            total = part if total is None else total.add_(part)
        assert total is not None
        return total

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        a, b = ctx.saved_tensors
        return abt(g, b, ctx.square), atb(a, g, ctx.square), None


class _ABT(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, square: Square) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.square = square
        mine = None
        for at in range(square.q):
            part = a @ wire.broadcast(b, square.col, at, b.shape).t()
            summed = wire.reduce_to(part, square.row, at)
            mine = summed if at == square.row.at else mine
        assert mine is not None
        return mine

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        a, b = ctx.saved_tensors
        return ab(g, b, ctx.square), atb(g, a, ctx.square), None


class _ATB(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, square: Square) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.square = square
        mine = None
        for at in range(square.q):
            part = wire.broadcast(a, square.row, at, a.shape).t() @ b
            summed = wire.reduce_to(part, square.col, at)
            mine = summed if at == square.col.at else mine
        assert mine is not None
        return mine

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        a, b = ctx.saved_tensors
        return abt(b, g, ctx.square), ab(a, g, ctx.square), None


def ab(a: Tensor, b: Tensor, square: Square) -> Tensor:
    """Block (i, j) of A B."""
    return _AB.apply(a, b, square)


def abt(a: Tensor, b: Tensor, square: Square) -> Tensor:
    """Block (i, j) of A times the transpose of B."""
    return _ABT.apply(a, b, square)


def atb(a: Tensor, b: Tensor, square: Square) -> Tensor:
    """Block (i, j) of the transpose of A times B."""
    return _ATB.apply(a, b, square)

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


class _Product(Function):
    """One of the three forms; the gradients are products of the other two."""

    @staticmethod
    def forward(ctx: Any, form: str, a: Tensor, b: Tensor, square: Square) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.form, ctx.square = form, square
        result: Tensor | None = None
        for at in range(square.q):
            left = a if form == "abt" else wire.broadcast(a, square.row, at, a.shape)
            right = b if form == "atb" else wire.broadcast(b, square.col, at, b.shape)
            part = (left.t() if form == "atb" else left) @ (right.t() if form == "abt" else right)
            if form == "ab":
                result = part if result is None else result.add_(part)
                continue
            along = square.row if form == "abt" else square.col
            summed = wire.reduce_to(part, along, at)
            result = summed if at == along.at else result
        assert result is not None
        return result

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        a, b = ctx.saved_tensors
        square = ctx.square
        if ctx.form == "ab":
            return None, abt(g, b, square), atb(a, g, square), None
        if ctx.form == "abt":
            return None, ab(g, b, square), atb(g, a, square), None
        return None, abt(b, g, square), ab(a, g, square), None


def ab(a: Tensor, b: Tensor, square: Square) -> Tensor:
    """Block (i, j) of A B."""
    return _Product.apply("ab", a, b, square)


def abt(a: Tensor, b: Tensor, square: Square) -> Tensor:
    """Block (i, j) of A times the transpose of B."""
    return _Product.apply("abt", a, b, square)


def atb(a: Tensor, b: Tensor, square: Square) -> Tensor:
    """Block (i, j) of the transpose of A times B."""
    return _Product.apply("atb", a, b, square)

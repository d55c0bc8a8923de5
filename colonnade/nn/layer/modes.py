"""The built-in arrangements of the tensor modes '1d', '2d', '2.5d' and '3d': importing this module registers them.

The collectives of each mode; those of a backward pass are the transposes (`colonnade.parallel.collectives` has the table).

| mode | product with a column weight | product with a row weight | embedding |
|---|---|---|---|
| 1d | none; backward all-reduces the gradient of x | all-reduce of y | all-reduce |
| 1d, `sequence_split` | all-gather of x along the sequence | reduce-scatter of y along the sequence | reduce-scatter |
| 2d, 2.5d | broadcasts of x along rows, of the weight along columns | broadcasts of the weight along columns, reduces of y along rows | reduce-scatter along rows, all-to-all |
| 3d | all-gather of x over INPUT and of the weight over WEIGHT, reduce-scatter of y over OUTPUT | the same with INPUT and OUTPUT exchanged | reduce-scatter |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.nn.layer.arrangement import ARRANGEMENT, Arrangement, Split, masked_rows
from colonnade.nn.layer.spread import Spread, cut, size_of
from colonnade.parallel import collectives, wire
from colonnade.parallel.collectives import Way, column_linear, row_linear
from colonnade.parallel.wire import Members, members_of

_1D = ParallelMode.PARALLEL_1D


@ARRANGEMENT.register_module("1d")
class OneD(Arrangement):
    """A column weight is split by its rows, a row weight by its columns, over PARALLEL_1D; uneven parts work.

    Between blocks activations are whole on every rank, or, with `sequence_split=True`, split along the sequence: the
    same bytes travel, and norms, dropouts and residuals hold a part each. Inside they are split along hidden.
    """

    inner = Spread(hidden=_1D)
    uneven = True
    splits_sequence = multiplies_blocks = True

    def __init__(self, context: ParallelContext, sequence_split: bool = False) -> None:
        super().__init__(context, sequence_split)
        self.outer = Spread(sequence=_1D) if sequence_split else Spread()

    def weight_modes(self, split: Split) -> tuple[tuple[ParallelMode, ...], tuple[ParallelMode, ...]]:
        return ((_1D,), ()) if split == "column" else ((), (_1D,))

    def product(self, x: Tensor, weight: Tensor, split: Split) -> Tensor:
        return self.linear(x, weight, None, split)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, split: Split) -> Tensor:
        matrix, members = weight.flatten(0, -2), members_of(_1D, self.context)
        if members is None:
            return self.multiply(x, matrix, bias)
        # The compiler orders collectives and products itself, and float8 has a product of its own.
        if torch.compiler.is_compiling() or self.multiply is not F.linear:
            if split == "column":
                return self.multiply(self.enter(x), matrix, bias)
            y = self._leave(self.multiply(x, matrix, None))
            return y if bias is None else y + bias
        way = Way(members, x.dim() - 2 if self.sequence_split else None, self.enter, self._leave)
        if split == "column":
            return column_linear(x, matrix, bias, way)
        if self.sequence_split:
            cut(x.shape[-2], _1D, self.context, "sequence")  # says what cannot be split
        return row_linear(x, matrix, bias, way)

    def enter(self, x: Tensor) -> Tensor:
        """Whole in forward; in backward the sum of what every rank's columns say."""
        if not self.sequence_split:
            return collectives.copy(x, _1D, context=self.context)
        sizes = (x.shape[-2],) * size_of(_1D, self.context)
        return collectives.all_gather(x, _1D, -2, sizes, context=self.context)

    def embed(self, tokens: Tensor, weight: Tensor, rows: int, padding: int | None) -> Tensor:
        return self._leave(masked_rows(tokens, weight, self.first_row(rows), padding))

    def _leave(self, x: Tensor) -> Tensor:
        """The sum of every rank's partial result."""
        if not self.sequence_split:
            return collectives.reduce(x, _1D, context=self.context)
        sizes = cut(x.shape[-2], _1D, self.context, "sequence")
        return collectives.reduce_scatter(x, _1D, -2, sizes, context=self.context)


# --- SUMMA: products of matrices that lie as blocks on a square of ranks, in three forms that differentiate into each other ---
#
# On a q x q square, rank (i, j) has block (i, j) of every matrix; i is its place in the column group, j in the row
# group. Only blocks are kept for backward: panels travel again, so memory stays 1/q^2 of the matrices.
#
# | product | travels along rows | travels along columns | gradients |
# |---|---|---|---|
# | `ab`: A B | A, broadcast | B, broadcast | `abt(g, B)`, `atb(A, g)` |
# | `abt`: A B^T | the result, reduced | B, broadcast | `ab(g, B)`, `atb(g, A)` |
# | `atb`: A^T B | A, broadcast | the result, reduced | `abt(B, g)`, `ab(A, g)` |


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


class _OnSquares(Arrangement):
    """SUMMA on one square of ranks, or on `depth` squares that share the batch.

    Rank (d, i, j): square d, row i (its place in a COL group), column j (its place in a ROW group). The batch is split
    over the columns of the squares (and over the squares), the hidden dimension over their rows. A column weight lies
    so that x travels, a row weight so that the result does: in both cases the narrow side of a block, since column
    weights widen and row weights narrow.
    """

    row: ParallelMode
    col: ParallelMode
    depth: ParallelMode | None = None
    batch: ParallelMode

    def __init__(self, context: ParallelContext, sequence_split: bool = False) -> None:
        super().__init__(context, sequence_split)
        self.outer = self.inner = Spread(batch=self.batch, hidden=self.row)

    @property
    def summed(self) -> tuple[ParallelMode, ...]:
        return () if self.depth is None else (self.depth,)

    def weight_modes(self, split: Split) -> tuple[tuple[ParallelMode, ...], tuple[ParallelMode, ...]]:
        return ((self.row,), (self.col,)) if split == "column" else ((self.col,), (self.row,))

    def product(self, x: Tensor, weight: Tensor, split: Split) -> Tensor:
        x, matrix = _as_autocast(x, weight.flatten(0, -2))
        square = self._square()
        if square is None:
            return F.linear(x, matrix)
        rows = x.flatten(0, -2)
        y = ab(rows, matrix.t(), square) if split == "column" else abt(rows, matrix, square)
        return y.unflatten(0, x.shape[:-1])

    def embed(self, tokens: Tensor, weight: Tensor, rows: int, padding: int | None) -> Tensor:
        """Rank (i, j) has the vocabulary's part j and the hidden part i: sums over j, then trades with (j, i)."""
        if self.depth is not None:
            sizes = cut(len(tokens), self.depth, self.context, "batch")
            tokens = collectives.scatter(tokens, self.depth, 0, sizes, context=self.context)
        found = masked_rows(tokens, weight, self.first_row(rows), padding)
        sizes = cut(len(found), self.row, self.context, "batch")
        return self._trade(collectives.reduce_scatter(found, self.row, 0, sizes, context=self.context))

    def _trade(self, x: Tensor) -> Tensor:
        """What rank (j, i) of the same square holds."""
        if self._square() is None:
            return x
        q, tensor = size_of(self.row, self.context), ParallelMode.TENSOR
        i, j = self.context.get_local_rank(self.col), self.context.get_local_rank(self.row)
        sizes = [0] * size_of(tensor, self.context)
        sizes[self.context.get_local_rank(tensor) + (j - i) * (q - 1)] = len(x)
        return collectives.all_to_all(x, tensor, sizes, sizes, context=self.context)

    def _square(self) -> Square | None:
        row, col = members_of(self.row, self.context), members_of(self.col, self.context)
        return None if row is None or col is None else Square(row, col)


@ARRANGEMENT.register_module("2d")
class TwoD(_OnSquares):
    """One square: batch over PARALLEL_2D_COL, hidden over PARALLEL_2D_ROW."""

    row = ParallelMode.PARALLEL_2D_ROW
    col = ParallelMode.PARALLEL_2D_COL
    batch = ParallelMode.PARALLEL_2D_COL


@ARRANGEMENT.register_module("2.5d")
class TwoAndAHalfD(_OnSquares):
    """`depth` squares: batch over PARALLEL_2P5D_XZ, hidden over PARALLEL_2P5D_ROW, weights alike on each square."""

    row = ParallelMode.PARALLEL_2P5D_ROW
    col = ParallelMode.PARALLEL_2P5D_COL
    depth = ParallelMode.PARALLEL_2P5D_DEP
    batch = ParallelMode.PARALLEL_2P5D_XZ


_INPUT, _WEIGHT, _OUTPUT = (
    ParallelMode.PARALLEL_3D_INPUT,
    ParallelMode.PARALLEL_3D_WEIGHT,
    ParallelMode.PARALLEL_3D_OUTPUT,
)


@ARRANGEMENT.register_module("3d")
class ThreeD(Arrangement):
    """A cube of ranks, each dimension of a product on one of its edges: rank (o, i, w) by its places in the OUTPUT,
    INPUT and WEIGHT groups.

    A column weight takes activations whose hidden dimension lies on OUTPUT to ones where it lies on INPUT, a row weight
    takes them back; the batch lies on the other two. Every matrix is split over all the ranks: nothing is held twice.
    Outer: batch over INPUT x WEIGHT, hidden over OUTPUT. Inner: batch over OUTPUT x WEIGHT, hidden over INPUT.
    """

    outer = Spread(batch=ParallelMode.PARALLEL_3D_INPUT_X_WEIGHT, hidden=_OUTPUT)
    inner = Spread(batch=ParallelMode.PARALLEL_3D_OUTPUT_X_WEIGHT, hidden=_INPUT)
    multiplies_blocks = True

    def weight_modes(self, split: Split) -> tuple[tuple[ParallelMode, ...], tuple[ParallelMode, ...]]:
        return ((_INPUT, _WEIGHT), (_OUTPUT,)) if split == "column" else ((_OUTPUT, _WEIGHT), (_INPUT,))

    def product(self, x: Tensor, weight: Tensor, split: Split) -> Tensor:
        """Rows of x and rows of the weight are gathered, partial products summed; the rows of y are split again."""
        gathered, summed = (_INPUT, _OUTPUT) if split == "column" else (_OUTPUT, _INPUT)
        rows = self._gather(x, gathered, 0)
        matrix = self._gather(weight, _WEIGHT, -2).flatten(0, -2)
        y = self.multiply(rows, matrix, None)
        sizes = cut(len(y), summed, self.context, "batch")
        return collectives.reduce_scatter(y, summed, 0, sizes, context=self.context)

    def embed(self, tokens: Tensor, weight: Tensor, rows: int, padding: int | None) -> Tensor:
        mode = ParallelMode.PARALLEL_3D_INPUT_X_WEIGHT
        found = masked_rows(tokens, weight, self.first_row(rows), padding)
        sizes = cut(len(found), mode, self.context, "batch")
        return collectives.reduce_scatter(found, mode, 0, sizes, context=self.context)

    def _gather(self, x: Tensor, mode: ParallelMode, dim: int) -> Tensor:
        sizes = (x.shape[dim],) * size_of(mode, self.context)
        return collectives.all_gather(x, mode, dim, sizes, context=self.context)


def _as_autocast(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Both as autocast would have them in a product: what is kept for backward must have one dtype."""
    if not torch.is_autocast_enabled(x.device.type):
        return x, weight
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), weight.to(dtype)

"""The '2d' and '2.5d' arrangements: SUMMA on one square of ranks, or on `depth` squares that share the batch.

The batch is split over the columns of the squares (and over the squares), the hidden dimension over their rows.
A column weight lies so that x travels, a row weight so that the result does: in both cases the narrow side of a
block, since column weights widen and row weights narrow.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.nn.layer.arrangement import ARRANGEMENT, Arrangement, Split, masked_rows
from colonnade.nn.layer.spread import Spread, cut, size_of
from colonnade.nn.layer.summa import Square, ab, abt
from colonnade.parallel import collectives
from colonnade.parallel.collectives import members_of


class _OnSquares(Arrangement):
    """Rank (d, i, j): square d, row i (its place in a COL group), column j (its place in a ROW group)."""

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
        x, matrix = as_autocast(x, weight.flatten(0, -2))
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
        sizes[self.context.get_local_rank(tensor) // q**2 * q**2 + j * q + i] = len(x)
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


def as_autocast(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Both as autocast would have them in a product: what is kept for backward must have one dtype."""
    if not torch.is_autocast_enabled(x.device.type):
        return x, weight
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), weight.to(dtype)

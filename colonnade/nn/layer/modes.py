"""The built-in arrangements of the tensor modes '1d', '2d', '2.5d' and '3d'; importing this module registers them.

- 1d is Megatron-style column and row parallelism (Shoeybi et al. 2019); `sequence_split` is Megatron's sequence parallelism.
- 2d is SUMMA (Xu et al., "An Efficient 2D Method for Training Super-Large Deep Learning Models").
- 2.5d is Tesseract (Wang et al.): SUMMA on several squares of ranks that share the batch.
- 3d is the method of Bian et al., "Maximizing Parallelism in Distributed Training for Huge Neural Networks".

The collectives of each mode; the backward pass uses their transposes (`colonnade.parallel.collectives` has the table).

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
from colonnade.nn.layer.spread import Spread, shard_sizes, size_of
from colonnade.parallel import collectives, wire
from colonnade.parallel.collectives import Way, column_linear, row_linear
from colonnade.parallel.wire import Members, members_of

_1D = ParallelMode.PARALLEL_1D


@ARRANGEMENT.register_module("1d")
class OneD(Arrangement):
    """Megatron-style column and row parallelism over PARALLEL_1D; shards may be uneven.

    A column weight is sharded by its output features, a row weight by its input features. Between blocks activations are
    replicated or, with `sequence_split=True`, sharded along the sequence: the same communication volume, and norms,
    dropouts and residuals need 1/ranks of the memory. Inside a block activations are sharded along hidden.
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
        # `column_linear` and `row_linear` overlap collectives and products by hand. The compiler does that itself, and float8
        # replaces the product.
        if torch.compiler.is_compiling() or self.multiply is not F.linear:
            if split == "column":
                return self.multiply(self.enter(x), matrix, bias)
            y = self._leave(self.multiply(x, matrix, None))
            return y if bias is None else y + bias
        way = Way(members, x.dim() - 2 if self.sequence_split else None, self.enter, self._leave)
        if split == "column":
            return column_linear(x, matrix, bias, way)
        if self.sequence_split:
            shard_sizes(x.shape[-2], _1D, self.context, "sequence")  # raises if the sequence cannot be sharded
        return row_linear(x, matrix, bias, way)

    def enter(self, x: Tensor) -> Tensor:
        """Return the full input of a column product; backward all-reduces the gradient of the input."""
        if not self.sequence_split:
            return collectives.copy(x, _1D, context=self.context)
        sizes = (x.shape[-2],) * size_of(_1D, self.context)
        return collectives.all_gather(x, _1D, -2, sizes, context=self.context)

    def embed(self, tokens: Tensor, weight: Tensor, rows: int, padding: int | None) -> Tensor:
        return self._leave(masked_rows(tokens, weight, self.first_row(rows), padding))

    def _leave(self, x: Tensor) -> Tensor:
        """Reduce the partial results of all ranks into the outer spread."""
        if not self.sequence_split:
            return collectives.reduce(x, _1D, context=self.context)
        sizes = shard_sizes(x.shape[-2], _1D, self.context, "sequence")
        return collectives.reduce_scatter(x, _1D, -2, sizes, context=self.context)


# --- SUMMA: products of matrices sharded in blocks over a square of ranks, in three forms that are each other's gradients ---
#
# On a q x q square, rank (i, j) stores block (i, j) of every matrix; i is its rank in the column group, j in the row group.
# Backward keeps only the blocks and communicates the panels again, so memory stays 1/q^2 of the matrices.
#
# | product | sent along rows | sent along columns | gradients |
# |---|---|---|---|
# | `ab`: A B | A, broadcast | B, broadcast | `abt(g, B)`, `atb(A, g)` |
# | `abt`: A B^T | the result, reduced | B, broadcast | `ab(g, B)`, `atb(g, A)` |
# | `atb`: A^T B | A, broadcast | the result, reduced | `abt(B, g)`, `ab(A, g)` |


@dataclass(frozen=True)
class Square:
    """A square of ranks for SUMMA, from the view of this rank: its row and its column."""

    row: Members
    col: Members

    @property
    def q(self) -> int:
        return self.row.size


class _Product(Function):
    """A product of blocks in one of three forms; its gradients are products of the other two forms."""

    @staticmethod
    def forward(ctx: Any, form: str, a: Tensor, b: Tensor, square: Square) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.form, ctx.square = form, square
        result: Tensor | None = None
        for at in range(square.q):
            left = a if form == "abt" else wire.broadcast(a, square.row, at, a.shape)
            right = b if form == "atb" else wire.broadcast(b, square.col, at, b.shape)
            partial = (left.t() if form == "atb" else left) @ (right.t() if form == "abt" else right)
            if form == "ab":
                result = partial if result is None else result.add_(partial)
                continue
            # Panel `at` of the result belongs to rank `at` of the row (or column); other ranks get nothing to keep.
            along = square.row if form == "abt" else square.col
            reduced = wire.reduce_to(partial, along, at)
            result = reduced if at == along.at else result
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
    """Return this rank's block of A B. A block has the row and the column of its rank."""
    return _Product.apply("ab", a, b, square)


def abt(a: Tensor, b: Tensor, square: Square) -> Tensor:
    """Return this rank's block of A times the transpose of B."""
    return _Product.apply("abt", a, b, square)


def atb(a: Tensor, b: Tensor, square: Square) -> Tensor:
    """Return this rank's block of the transpose of A times B."""
    return _Product.apply("atb", a, b, square)


class _OnSquares(Arrangement):
    """SUMMA on one square of ranks, or on `depth` squares that share the batch.

    Rank (d, i, j): square d, row i (its rank in a COL group), column j (its rank in a ROW group). The batch is sharded over
    the columns of the squares (and over the squares), the hidden dimension over their rows. A column weight is stored
    so that x is communicated, a row weight so that the result is communicated. In both cases this is the narrower
    activation: column weights have more outputs than inputs, row weights fewer.
    """

    row: ParallelMode
    col: ParallelMode
    depth: ParallelMode | None = None
    batch: ParallelMode

    def __init__(self, context: ParallelContext, sequence_split: bool = False) -> None:
        super().__init__(context, sequence_split)
        self.outer = self.inner = Spread(batch=self.batch, hidden=self.row)

    @property
    def partial_modes(self) -> tuple[ParallelMode, ...]:
        return () if self.depth is None else (self.depth,)

    def weight_modes(self, split: Split) -> tuple[tuple[ParallelMode, ...], tuple[ParallelMode, ...]]:
        return ((self.row,), (self.col,)) if split == "column" else ((self.col,), (self.row,))

    def product(self, x: Tensor, weight: Tensor, split: Split) -> Tensor:
        matrix = weight.flatten(0, -2)
        if torch.is_autocast_enabled(x.device.type):
            # Autocast does not see into `_Product`, whose saved tensors need one dtype.
            dtype = torch.get_autocast_dtype(x.device.type)
            x, matrix = x.to(dtype), matrix.to(dtype)
        square = self._square()
        if square is None:
            return F.linear(x, matrix)
        rows = x.flatten(0, -2)
        y = ab(rows, matrix.t(), square) if split == "column" else abt(rows, matrix, square)
        return y.unflatten(0, x.shape[:-1])

    def embed(self, tokens: Tensor, weight: Tensor, rows: int, padding: int | None) -> Tensor:
        if self.depth is not None:
            sizes = shard_sizes(len(tokens), self.depth, self.context, "batch")
            tokens = collectives.scatter(tokens, self.depth, 0, sizes, context=self.context)
        # Rank (i, j) has shard j of the vocabulary and shard i of hidden. Reducing over j leaves it batch shard j.
        partial = masked_rows(tokens, weight, self.first_row(rows), padding)
        sizes = shard_sizes(len(partial), self.row, self.context, "batch")
        x = collectives.reduce_scatter(partial, self.row, 0, sizes, context=self.context)
        if self._square() is None:
            return x
        # The outer spread has batch shard i and hidden shard j: rank (i, j) exchanges its block with rank (j, i).
        q, tensor = size_of(self.row, self.context), ParallelMode.TENSOR
        i, j = self.context.get_local_rank(self.col), self.context.get_local_rank(self.row)
        sizes_to = [0] * size_of(tensor, self.context)
        sizes_to[self.context.get_local_rank(tensor) + (j - i) * (q - 1)] = len(x)
        return collectives.all_to_all(x, tensor, sizes_to, sizes_to, context=self.context)

    def _square(self) -> Square | None:
        row, col = members_of(self.row, self.context), members_of(self.col, self.context)
        return None if row is None or col is None else Square(row, col)


@ARRANGEMENT.register_module("2d")
class TwoD(_OnSquares):
    """SUMMA (Xu et al.) on one square: the batch is sharded over PARALLEL_2D_COL, hidden over PARALLEL_2D_ROW."""

    row = ParallelMode.PARALLEL_2D_ROW
    col = ParallelMode.PARALLEL_2D_COL
    batch = ParallelMode.PARALLEL_2D_COL


@ARRANGEMENT.register_module("2.5d")
class TwoAndAHalfD(_OnSquares):
    """Tesseract (Wang et al.): the ranks form `depth` squares, and every square has the same weights.

    The batch is sharded over PARALLEL_2P5D_XZ, hidden over PARALLEL_2P5D_ROW.
    """

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
    """3D parallelism (Bian et al.) on a cube of ranks, whose edges are the OUTPUT, INPUT and WEIGHT groups.

    The batch of an activation is sharded over two edges, its hidden dimension over the third:

    | spread | batch | hidden |
    |---|---|---|
    | outer | INPUT x WEIGHT | OUTPUT |
    | inner | OUTPUT x WEIGHT | INPUT |

    A column weight maps the outer to the inner spread, a row weight maps back. Every matrix is sharded over all ranks,
    without replicas.
    """

    outer = Spread(batch=ParallelMode.PARALLEL_3D_INPUT_X_WEIGHT, hidden=_OUTPUT)
    inner = Spread(batch=ParallelMode.PARALLEL_3D_OUTPUT_X_WEIGHT, hidden=_INPUT)
    multiplies_blocks = True

    def weight_modes(self, split: Split) -> tuple[tuple[ParallelMode, ...], tuple[ParallelMode, ...]]:
        return ((_INPUT, _WEIGHT), (_OUTPUT,)) if split == "column" else ((_OUTPUT, _WEIGHT), (_INPUT,))

    def product(self, x: Tensor, weight: Tensor, split: Split) -> Tensor:
        """Multiply x by the transposed weight: all-gather rows of x and of the weight, multiply, reduce-scatter rows of y."""
        gathered, reduced = (_INPUT, _OUTPUT) if split == "column" else (_OUTPUT, _INPUT)
        rows = self._gather(x, gathered, 0)
        matrix = self._gather(weight, _WEIGHT, -2).flatten(0, -2)
        partial = self.multiply(rows, matrix, None)
        sizes = shard_sizes(len(partial), reduced, self.context, "batch")
        return collectives.reduce_scatter(partial, reduced, 0, sizes, context=self.context)

    def embed(self, tokens: Tensor, weight: Tensor, rows: int, padding: int | None) -> Tensor:
        mode = ParallelMode.PARALLEL_3D_INPUT_X_WEIGHT
        partial = masked_rows(tokens, weight, self.first_row(rows), padding)
        sizes = shard_sizes(len(partial), mode, self.context, "batch")
        return collectives.reduce_scatter(partial, mode, 0, sizes, context=self.context)

    def _gather(self, x: Tensor, mode: ParallelMode, dim: int) -> Tensor:
        sizes = (x.shape[dim],) * size_of(mode, self.context)
        return collectives.all_gather(x, mode, dim, sizes, context=self.context)

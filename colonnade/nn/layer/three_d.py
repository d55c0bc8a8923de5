"""The '3d' arrangement: a cube of ranks, each dimension of a product on one of its edges.

Rank (o, i, w) by its places in the OUTPUT, INPUT and WEIGHT groups. A column weight takes activations whose hidden
dimension lies on OUTPUT to ones where it lies on INPUT, a row weight takes them back; the batch lies on the other
two. Every matrix is split over all the ranks: nothing is held twice.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from colonnade.context.parallel_mode import ParallelMode
from colonnade.nn.layer.arrangement import ARRANGEMENT, Arrangement, Split, masked_rows
from colonnade.nn.layer.spread import Spread, cut, size_of
from colonnade.parallel import collectives

_INPUT, _WEIGHT, _OUTPUT = (
    ParallelMode.PARALLEL_3D_INPUT,
    ParallelMode.PARALLEL_3D_WEIGHT,
    ParallelMode.PARALLEL_3D_OUTPUT,
)


@ARRANGEMENT.register_module("3d")
class ThreeD(Arrangement):
    """Outer: batch over INPUT x WEIGHT, hidden over OUTPUT. Inner: batch over OUTPUT x WEIGHT, hidden over INPUT."""

    outer = Spread(batch=ParallelMode.PARALLEL_3D_INPUT_X_WEIGHT, hidden=_OUTPUT)
    inner = Spread(batch=ParallelMode.PARALLEL_3D_OUTPUT_X_WEIGHT, hidden=_INPUT)

    def weight_modes(self, split: Split) -> tuple[tuple[ParallelMode, ...], tuple[ParallelMode, ...]]:
        return ((_INPUT, _WEIGHT), (_OUTPUT,)) if split == "column" else ((_OUTPUT, _WEIGHT), (_INPUT,))

    def product(self, x: Tensor, weight: Tensor, split: Split) -> Tensor:
        """Rows of x and rows of the weight are gathered, partial products summed; the rows of y are split again."""
        gathered, summed = (_INPUT, _OUTPUT) if split == "column" else (_OUTPUT, _INPUT)
        rows = self._gather(x, gathered, 0)
        matrix = self._gather(weight, _WEIGHT, -2).flatten(0, -2)
        y = F.linear(rows, matrix)
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

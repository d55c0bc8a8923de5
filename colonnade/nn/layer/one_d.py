"""The '1d' arrangement: a column weight split by its rows, a row weight by its columns, over PARALLEL_1D.

Between blocks activations are whole on every rank, or, with `sequence_split=True`, split along the sequence: the
same bytes travel, and norms, dropouts and residuals hold a part each.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.nn.layer.arrangement import ARRANGEMENT, Arrangement, Split, masked_rows
from colonnade.nn.layer.spread import Spread, cut, size_of
from colonnade.parallel import collectives

MODE = ParallelMode.PARALLEL_1D


@ARRANGEMENT.register_module("1d")
class OneD(Arrangement):
    """Inner activations are split along the hidden dimension; uneven parts work."""

    inner = Spread(hidden=MODE)
    uneven = True
    splits_sequence = True

    def __init__(self, context: ParallelContext, sequence_split: bool = False) -> None:
        super().__init__(context, sequence_split)
        self.outer = Spread(sequence=MODE) if sequence_split else Spread()

    def weight_modes(self, split: Split) -> tuple[tuple[ParallelMode, ...], tuple[ParallelMode, ...]]:
        return ((MODE,), ()) if split == "column" else ((), (MODE,))

    def product(self, x: Tensor, weight: Tensor, split: Split) -> Tensor:
        return self.linear(x, weight, None, split)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, split: Split) -> Tensor:
        matrix = weight.flatten(0, -2)
        if split == "column":
            return F.linear(self._enter(x), matrix, bias)
        y = self._leave(F.linear(x, matrix))
        return y if bias is None else y + bias

    def embed(self, tokens: Tensor, weight: Tensor, rows: int, padding: int | None) -> Tensor:
        return self._leave(masked_rows(tokens, weight, self.first_row(rows), padding))

    def _enter(self, x: Tensor) -> Tensor:
        """Whole in forward; in backward the sum of what every rank's columns say."""
        if not self.sequence_split:
            return collectives.copy(x, MODE, context=self.context)
        sizes = (x.shape[-2],) * size_of(MODE, self.context)
        return collectives.all_gather(x, MODE, -2, sizes, context=self.context)

    def _leave(self, x: Tensor) -> Tensor:
        """The sum of every rank's partial result."""
        if not self.sequence_split:
            return collectives.reduce(x, MODE, context=self.context)
        sizes = cut(x.shape[-2], MODE, self.context, "sequence")
        return collectives.reduce_scatter(x, MODE, -2, sizes, context=self.context)

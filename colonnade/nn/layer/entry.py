"""Where a model begins and ends: from whole tensors to the spread of the tensor mode, and back."""

from __future__ import annotations

from torch import Tensor

from colonnade.nn.layer.arrangement import Arrangement, Side, arrange
from colonnade.nn.layer.spread import Spread, Width, gather, scatter


def partition_input(
    x: Tensor,
    *,
    sequence: int | None = -2,
    hidden: int | None = -1,
    unit: int = 1,
    side: Side = "outer",
    arrangement: Arrangement | None = None,
) -> Tensor:
    """This rank's part of a whole x, the same on all ranks of the tensor group; backward joins the gradients.

    `sequence` and `hidden` say where those dimensions are, None where x has none; the batch is dimension 0.
    """
    here = arrangement or arrange()
    return scatter(x, here.side(side), here.context, (0, sequence, hidden), Width(None, unit, here.uneven))


def gather_output(
    x: Tensor,
    *,
    sequence: int | None = -2,
    hidden: int | None = -1,
    features: int | None = None,
    unit: int = 1,
    side: Side = "outer",
    arrangement: Arrangement | None = None,
) -> Tensor:
    """The whole of an activation, on every rank of the tensor group; backward takes this rank's part.

    What follows must be the same on all of them. `features` is the whole hidden size; it is needed where the parts
    are uneven. The logits of a `Classifier` are of side "inner".
    """
    here = arrangement or arrange()
    return gather(x, here.side(side), here.context, (0, sequence, hidden), Width(features, unit, here.uneven))


def gather_sequence(x: Tensor, *, arrangement: Arrangement | None = None) -> Tensor:
    """An activation of the outer spread with its whole sequence; as it is unless sequences are split.

    What follows (pooling, a head) must be the same on all ranks: build it with `arrange(sequence_split=False)`.
    """
    here = arrangement or arrange()
    return gather(x, Spread(sequence=here.outer.sequence), here.context)

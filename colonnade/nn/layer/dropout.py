"""Dropout with equal masks for replicated activations and independent masks for sharded ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn import functional as F

from colonnade.context.parallel_mode import ParallelMode
from colonnade.nn.layer.arrangement import Arrangement, Side, arrange


class Dropout(nn.Dropout):
    """torch.nn.Dropout on an activation of the outer or the inner spread (`side`).

    A replicated activation gets the same mask on all ranks of the tensor group. Shards get masks from the RNG stream of
    TENSOR, which differs between these ranks.
    """

    def __init__(
        self, p: float = 0.5, inplace: bool = False, *, side: Side = "outer", arrangement: Arrangement | None = None
    ) -> None:
        super().__init__(p, inplace)
        self.arrangement, self.side = arrangement or arrange(), side

    @classmethod
    def from_module(
        cls, module: nn.Dropout, *, side: Side = "outer", arrangement: Arrangement | None = None
    ) -> Dropout:
        """Make the equivalent of a torch.nn.Dropout."""
        return cls(module.p, module.inplace, side=side, arrangement=arrangement)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        with stream_of(self.arrangement, self.side):
            return F.dropout(x, self.p, True, self.inplace)


@contextmanager
def stream_of(arrangement: Arrangement, side: Side) -> Iterator[None]:
    """Use the RNG stream for activations of this side in the block.

    Replicated activations use the common stream, sharded activations the stream of TENSOR.
    """
    if not arrangement.is_split(side):
        yield
        return
    with arrangement.context.streams.use(ParallelMode.TENSOR):
        yield

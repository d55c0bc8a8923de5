"""Megatron-LM #7452, finding 5: the padding mask of the experts was cut over another tensor group than the tokens.

Shows as: other tokens are masked than should be.
"""

import torch
from torch import nn

from colonnade import ParallelMode
from colonnade.parallel.collectives import gather, scatter
from tests.corpus import models
from tests.corpus.runner import Bug, Kind, Run


class Masked(models.ScatteredTokens):
    """Rows whose last number is negative are padding, and go around the gate."""

    over = ParallelMode.TENSOR

    def forward(self, x):
        padding = scatter((x[:, -1:] < 0).double(), self.over, 0, context=self.context)
        own = scatter(x, ParallelMode.TENSOR, 0, context=self.context)
        inner = torch.tanh(self.norm(self.gate(own) * (1 - padding) + own))
        return self.head(gather(inner, ParallelMode.TENSOR, 0, context=self.context))


class OtherGroup(Masked):
    over = ParallelMode.DATA


BUG = Bug(
    "Megatron-LM #7452, finding 5",
    "the padding mask is split over another group than the tokens",
    "forward-differs",
    ranks=4,
    layout={"tensor": 2},
    kind=Kind(Masked, lambda context: nn.MSELoss()),
)


def plant(run: Run) -> None:
    run.model = OtherGroup

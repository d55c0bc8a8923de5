"""mcore-bridge #173: the factor of an adapter that all tensor ranks hold saw a share of the tokens, and was not marked for it.

Shows as: each tensor rank trains another copy of that factor.
"""

import torch
from torch import nn

from colonnade import ParallelMode, Replicate, place
from colonnade.parallel.collectives import gather, scatter
from tests.corpus import models
from tests.corpus.runner import Bug, Kind, Run
from tests.corpus.unplaced import forgetting


class Adapted(models.ScatteredTokens):
    """With two small factors beside the gate."""

    def __init__(self, context):
        super().__init__(context)
        self.down, self.up = nn.Linear(models.WIDTH, 2, bias=False), nn.Linear(2, models.WIDTH, bias=False)
        for layer in (self.down, self.up):
            place(layer.weight, {ParallelMode.TENSOR: Replicate(owes="sum")})

    def forward(self, x):
        own = scatter(x, ParallelMode.TENSOR, 0, context=self.context)
        inner = torch.tanh(self.norm(self.gate(own) + self.up(self.down(own))))
        return self.head(gather(inner, ParallelMode.TENSOR, 0, context=self.context))


BUG = Bug(
    "mcore-bridge #173",
    "an adapter factor that sees some of the tokens is not all-reduced",
    "partial-gradient",
    ranks=4,
    layout={"tensor": 2},
    kind=Kind(Adapted),
)


def plant(run: Run) -> None:
    run.model = forgetting(run.model, "up")

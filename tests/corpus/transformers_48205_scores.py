"""transformers #48205: under expert parallelism each rank's gradient of the routing scores is that of its own experts.

Shows as: the router has a part of its gradient on each rank.
"""

import torch
from torch import nn
from torch.nn import functional as F

from colonnade import ParallelMode
from colonnade.parallel.collectives import copy
from tests.corpus import models
from tests.corpus.runner import Bug, Kind, Run


class Routed(models.TensorMLP):
    """A router weighs the inner units, of which each rank has its own."""

    def __init__(self, context):
        super().__init__(context)
        self.router = nn.Linear(models.WIDTH, models.INNER)

    def scores(self, x):
        return copy(torch.sigmoid(self.router(x)), ParallelMode.TENSOR, context=self.context)

    def forward(self, x):
        x, context = self.norm(x), self.context
        at = 0 if not context.is_initialized(ParallelMode.TENSOR) else context.get_local_rank(ParallelMode.TENSOR)
        own = self.scores(x)[:, at * len(self.up.bias) : (at + 1) * len(self.up.bias)]
        inner = torch.tanh(F.linear(self.enter(x), self.up.weight, self.up.bias)) * own
        return self.head(self.leave(F.linear(inner, self.down.weight)) + self.down.bias)


class Unsummed(Routed):
    def scores(self, x):
        return torch.sigmoid(self.router(x))


BUG = Bug(
    "transformers #48205",
    "the router receives only the gradient of its own rank's experts",
    "partial-gradient",
    layout={"tensor": 2},
    kind=Kind(Routed),
)


def plant(run: Run) -> None:
    run.model = Unsummed

"""torchtitan #1117: a router moved its balance between the forward pass and the recomputation, which then routed otherwise.

Shows as: forward is right; gradients are those of another routing.
"""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.corpus import models
from tests.corpus.runner import Bug, Kind, Run


class Routed(nn.Module):
    """One of two layers for each row, by scores and a balance."""

    moves = False

    def __init__(self):
        super().__init__()
        self.scores = nn.Linear(models.WIDTH, 2)
        self.ways = nn.ModuleList(nn.Linear(models.WIDTH, models.INNER) for _ in range(2))
        self.balance = 0.0

    def forward(self, x):
        score = self.scores(x).softmax(-1)
        first = (score[:, :1] + self.balance > score[:, 1:]).to(x.dtype)
        if self.moves:
            self.balance = 1.0 - self.balance
        return first * score[:, :1] * self.ways[0](x) + (1 - first) * score[:, 1:] * self.ways[1](x)


class Recomputed(nn.Module):
    """Routes again in the backward pass."""

    def __init__(self, context):
        super().__init__()
        self.enter, self.routed = nn.Linear(models.WIDTH, models.WIDTH), Routed()
        self.head = nn.Linear(models.INNER, models.OUT)

    def forward(self, x):
        return self.head(torch.tanh(checkpoint(self.routed, self.enter(x), use_reentrant=False)))


BUG = Bug(
    "torchtitan #1117", "the recomputation routes tokens differently", "recomputation-differs", kind=Kind(Recomputed)
)


def plant(run: Run) -> None:
    def move(engine):
        engine.model.routed.moves = True

    run.after.append(move)

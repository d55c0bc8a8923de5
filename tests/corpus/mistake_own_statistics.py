"""Invented: a norm inside a split region takes the mean and the variance of its own part of each row.

Shows as: what leaves the norm has other numbers on every tensor rank.
"""

import torch
from torch import nn
from torch.nn import functional as F

from colonnade import ParallelMode
from colonnade.parallel.collectives import reduce
from tests.corpus import models
from tests.corpus.runner import Bug, Kind, Run


class Normed(models.TensorMLP):
    """Divides the split activation by the root of the mean of its squares."""

    together = True

    def __init__(self, context):
        super().__init__(context)
        self.after = nn.Identity()

    def inside(self, x):
        inner = torch.tanh(F.linear(x, self.up.weight, self.up.bias))
        squares = inner.square().sum(-1, keepdim=True)
        whole = reduce(squares, ParallelMode.TENSOR, context=self.context) if self.together else squares
        width = models.INNER if self.together else inner.shape[-1]
        return F.linear(inner / (whole / width).sqrt(), self.down.weight)

    def leave(self, y):
        return self.after(super().leave(y))


class Alone(Normed):
    together = False


BUG = Bug(
    "invented: statistics of a part",
    "a LayerNorm over sharded activations uses the statistics of its shard",
    "forward-differs",
    layout={"tensor": 2},
    kind=Kind(Normed),
)


def plant(run: Run) -> None:
    run.model = Alone

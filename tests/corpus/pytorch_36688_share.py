"""pytorch #36382, #36688: the backward pass of a norm over ranks divided by the count of one rank.

Shows as: forward is right; what goes back through the mean is too large.
"""

import torch
from torch.nn import functional as F

from colonnade import ParallelMode
from colonnade.parallel.collectives import copy, reduce
from tests.corpus import models
from tests.corpus.runner import Bug, Kind, Run


class Centred(models.TensorMLP):
    """Takes the mean over all units, those of other ranks too, away from each."""

    def mean(self, inner):
        total = reduce(inner.sum(-1, keepdim=True), ParallelMode.TENSOR, context=self.context)
        return copy(total, ParallelMode.TENSOR, context=self.context) / models.INNER

    def inside(self, x):
        inner = torch.tanh(F.linear(x, self.up.weight, self.up.bias))
        return F.linear(inner - self.mean(inner), self.down.weight)


class OwnCount(Centred):
    def mean(self, inner):
        return models.scaled_gradient(super().mean(inner), models.INNER / inner.shape[-1])


BUG = Bug(
    "pytorch #36382, #36688",
    "the backward pass of a mean over ranks divides by one rank's count",
    "backward-differs",
    layout={"tensor": 2},
    kind=Kind(Centred),
)


def plant(run: Run) -> None:
    run.model = OwnCount

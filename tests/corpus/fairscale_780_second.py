"""fairscale #780: a layer that is used twice was reduced after its first gradient, and the second was added to the result.

Shows as: part of one layer's gradient is this rank's own.
"""

import torch
from torch import nn
from torch.nn import functional as F

from colonnade import ParallelMode
from tests.corpus import models
from tests.corpus.runner import Bug, Kind, Run, mean_over


class Twice(nn.Module):
    """One layer, used twice."""

    def __init__(self, context):
        super().__init__()
        self.context, self.layer = context, nn.Linear(models.WIDTH, models.WIDTH, bias=False)
        self.head = nn.Linear(models.WIDTH, models.OUT)

    def second(self):
        return self.layer.weight

    def forward(self, x):
        return self.head(torch.tanh(F.linear(torch.tanh(self.layer(x)), self.second())))


class Early(Twice):
    def second(self):
        alias = self.layer.weight * 1.0
        if alias.requires_grad:
            alias.register_hook(self.average)
        return alias

    def average(self, gradient):
        gradient = gradient.clone()
        mean_over(gradient, ParallelMode.DATA, self.context)
        return gradient


BUG = Bug("fairscale #780", "of a layer that is used twice, only one use is averaged", "not-reduced", kind=Kind(Twice))


def plant(run: Run) -> None:
    def reduce(name, gradient, context):
        if name != "layer.weight":
            mean_over(gradient, ParallelMode.DATA, context)

    run.model = Early
    run.reduce_by(reduce)

"""AReno #496: a projection whose one half is reduced in the backward pass already was summed whole over the tensor ranks.

Shows as: some rows of the gradient are too large by the number of tensor ranks, the others are right.
"""

import torch
from torch import nn
from torch.nn import functional as F

from colonnade import ParallelMode
from colonnade.parallel.collectives import copy
from tests.corpus import models
from tests.corpus.runner import Bug, Kind, Run, sum_over

SHARED = 2


class Compressed(models.TensorMLP):
    """What is compressed goes into the split region, the rest is added to what each rank's heads give."""

    def __init__(self, context):
        super().__init__(context)
        self.project = nn.Linear(models.WIDTH, models.WIDTH + SHARED)

    def rest(self, x):
        return copy(x, ParallelMode.TENSOR, context=self.context)

    def forward(self, x):
        compressed, rest = self.project(self.norm(x)).split([models.WIDTH, SHARED], -1)
        inner = torch.tanh(
            F.linear(self.enter(compressed), self.up.weight, self.up.bias) + self.rest(rest).prod(-1, keepdim=True)
        )
        return self.head(self.leave(F.linear(inner, self.down.weight)) + self.down.bias)


class RestIsLocal(Compressed):
    def rest(self, x):
        return x


BUG = Bug(
    "AReno #496",
    "a projection is all-reduced over the tensor ranks, although half of it is replicated",
    "summed-not-averaged",
    layout={"tensor": 2},
    kind=Kind(Compressed),
)


def plant(run: Run) -> None:
    def sum_all_of_it(name, gradient, context):
        if name.startswith("project"):
            sum_over(gradient, ParallelMode.TENSOR, context)

    run.model = RestIsLocal
    run.after_sums(sum_all_of_it)

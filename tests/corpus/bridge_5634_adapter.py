"""Megatron-Bridge #5634: the output of an adapter was gathered without a gradient.

Shows as: the model runs as it should, and the adapter never trains.
"""

import torch
from torch import nn

from tests.corpus import models
from tests.corpus.runner import Bug, Kind, Run


class Adapted(models.TensorMLP):
    """A narrow way around the split region."""

    flows = True

    def __init__(self, context):
        super().__init__(context)
        self.narrow, self.wide = nn.Linear(models.WIDTH, 2, bias=False), nn.Linear(2, models.WIDTH, bias=False)

    def forward(self, x):
        x = self.norm(x)
        around = self.wide(self.narrow(x))
        if not self.flows:
            around = around.detach()
        return self.head(self.leave(self.inside(self.enter(x))) + self.down.bias + torch.tanh(around))


class Cut(Adapted):
    flows = False


BUG = Bug(
    "Megatron-Bridge #5634",
    "the adapter's output has no gradient",
    "missing-gradient",
    layout={"tensor": 2},
    kind=Kind(Adapted),
)


def plant(run: Run) -> None:
    run.model = Cut

"""Megatron-Bridge #5634: with split experts the output of an adapter was cut from the graph.

Shows as: the adapter never moves.
"""

from torch import nn

from tests.corpus import models
from tests.corpus.runner import Bug, Kind, Run


class Adapted(models.TensorMLP):
    """With two small factors beside the split region, which read the input."""

    def __init__(self, context):
        super().__init__(context)
        self.small, self.wide = nn.Linear(models.WIDTH, 2, bias=False), nn.Linear(2, models.WIDTH, bias=False)

    def delta(self, x):
        return self.wide(self.small(x))

    def forward(self, x):
        inner = self.leave(self.inside(self.enter(self.norm(x)))) + self.down.bias
        return self.head(inner + self.delta(x))


class Detached(Adapted):
    def delta(self, x):
        return super().delta(x).detach()


BUG = Bug(
    "Megatron-Bridge #5634",
    "the output of an adapter is detached",
    "missing-gradient",
    layout={"tensor": 2},
    kind=Kind(Adapted),
)


def plant(run: Run) -> None:
    run.model = Detached

"""Megatron-Bridge #5634: an adapter gave its whole output to a sum over the ranks, which counted it once for each.

Shows as: what the adapter adds is too large by the number of tensor ranks.
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


class Counted(Adapted):
    def forward(self, x):
        inner = self.leave(self.inside(self.enter(self.norm(x))) + self.delta(x))
        return self.head(inner + self.down.bias)


BUG = Bug(
    "Megatron-Bridge #5634",
    "the full output of an adapter is all-reduced over the ranks",
    "forward-differs",
    ranks=4,
    layout={"tensor": 4},
    kind=Kind(Adapted),
)


def plant(run: Run) -> None:
    run.model = Counted

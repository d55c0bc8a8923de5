"""Invented: the columns of all tensor ranks are gathered with the last rank's first.

Shows as: the right numbers in other columns.
"""

from torch import nn
from torch.nn import functional as F

from colonnade import ParallelMode
from colonnade.parallel.collectives import copy, gather
from tests.corpus import models
from tests.corpus.runner import Bug, Kind, Run


class Columns(nn.Module):
    """A layer that is cut by columns, whose outputs are gathered."""

    def __init__(self, context):
        super().__init__()
        self.context = context
        self.up, self.head = nn.Linear(models.WIDTH, models.INNER), nn.Linear(models.INNER, models.OUT)
        self.up.weight = models.own_part(self.up.weight, 0, context)
        self.up.bias = models.own_part(self.up.bias, 0, context)
        self.gathered = nn.Identity()

    def join(self, y):
        return gather(y, ParallelMode.TENSOR, 1, context=self.context)

    def forward(self, x):
        y = F.linear(copy(x, ParallelMode.TENSOR, context=self.context), self.up.weight, self.up.bias)
        return self.head(self.gathered(self.join(y).tanh()))


class Backwards(Columns):
    def join(self, y):
        first, second = super().join(y).chunk(2, 1)
        return nn.functional.pad(second, (0, first.shape[1])) + nn.functional.pad(first, (second.shape[1], 0))


BUG = Bug(
    "invented: gathered backwards",
    "columns are gathered in the wrong order of ranks",
    "forward-differs",
    layout={"tensor": 2},
    kind=Kind(Columns),
)


def plant(run: Run) -> None:
    run.model = Backwards

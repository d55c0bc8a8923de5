"""Invented: only the first tensor rank takes the loss; the others send back nothing.

Shows as: the shards of the other ranks never move.
"""

from torch import nn

from colonnade import ParallelMode
from tests.corpus.models import scaled_gradient
from tests.corpus.runner import TENSOR, Bug, Run

BUG = Bug(
    "invented: loss of the first",
    "only the loss of the first tensor rank has a gradient",
    "missing-gradient",
    layout={"tensor": 2},
    kind=TENSOR,
)


def plant(run: Run) -> None:
    class First(nn.MSELoss):
        def __init__(self, context):
            super().__init__()
            self.times = 1.0 if context.get_local_rank(ParallelMode.TENSOR) == 0 else 0.0

        def forward(self, out, label):
            return scaled_gradient(super().forward(out, label), self.times)

    run.criterion = First

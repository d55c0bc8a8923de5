"""Invented: the second rank's criterion sums over its rows where the first takes the mean.

Shows as: one rank's rows count four times.
"""

from torch import nn

from colonnade import ParallelMode
from tests.corpus.runner import Bug, Run

BUG = Bug("invented: a sum on one rank", "the second rank's loss is summed over its rows", "wrong-divisor")


def plant(run: Run) -> None:
    class Summed(nn.MSELoss):
        def forward(self, out, label):
            return super().forward(out, label) * len(out)

    run.criterion = lambda context: Summed() if context.get_local_rank(ParallelMode.DATA) == 1 else nn.MSELoss()

"""pytorch #128949: a parameter that is unused on one rank is left out of the sums, and replicas part in silence.

Shows as: its gradient is the local one on the ranks that used it.
"""

import torch.distributed as dist
from torch import nn

from colonnade import ParallelMode
from tests.corpus.branch import Branch, batches
from tests.corpus.runner import Bug, Kind, Run, mean_over

BUG = Bug(
    "pytorch #128949",
    "a parameter that one rank does not use is not reduced",
    "not-reduced",
    kind=Kind(Branch, lambda context: nn.MSELoss(), batches),
)


def plant(run: Run) -> None:
    def reduce(name, gradient, context):
        used = (gradient != 0).any().double()
        dist.all_reduce(used, op=dist.ReduceOp.MIN)
        if used:
            mean_over(gradient, ParallelMode.DATA, context)

    run.reduce_by(reduce)

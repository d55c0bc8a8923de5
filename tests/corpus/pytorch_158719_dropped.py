"""pytorch #158719: FSDP2 does not reduce the gradient of a parameter that was unused on some rank.

Shows as: the parameter has no gradient, though some samples used it.
"""

import torch.distributed as dist
from torch import nn

from colonnade import ParallelMode
from tests.corpus.branch import Branch, batches
from tests.corpus.runner import Bug, Kind, Run, mean_over

BUG = Bug(
    "pytorch #158719",
    "the gradient of a parameter that one rank does not use is lost",
    "missing-gradient",
    kind=Kind(Branch, lambda context: nn.MSELoss(), batches),
)


def plant(run: Run) -> None:
    def reduce(name, gradient, context):
        used = (gradient != 0).any().double()
        dist.all_reduce(used, op=dist.ReduceOp.MIN)
        if used:
            mean_over(gradient, ParallelMode.DATA, context)
        else:
            gradient.zero_()

    run.reduce_by(reduce)

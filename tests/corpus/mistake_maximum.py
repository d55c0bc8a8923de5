"""Invented: a reduction was copied from that of a flag, with its operation.

Shows as: each element is the largest of all ranks.
"""

import torch.distributed as dist

from tests.corpus.runner import Bug, Run

BUG = Bug("invented: operation", "gradients are reduced by maximum", "wrong-operation")


def plant(run: Run) -> None:
    run.reduce_by(lambda name, gradient, context: dist.all_reduce(gradient, dist.ReduceOp.MAX))

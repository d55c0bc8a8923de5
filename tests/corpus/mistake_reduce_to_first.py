"""Invented: a handler calls reduce, which leaves the sum on one rank, for all_reduce.

Shows as: the first rank is right, the others keep what they had.
"""

import torch.distributed as dist

from tests.corpus.runner import Bug, Run

BUG = Bug("invented: reduce", "only the first data rank receives the sum", "not-reduced")


def plant(run: Run) -> None:
    def reduce(name, gradient, context):
        gradient /= dist.get_world_size()
        own = gradient.clone() * dist.get_world_size()
        dist.reduce(gradient, 0)
        if dist.get_rank() != 0:
            gradient.copy_(own)

    run.reduce_by(reduce)

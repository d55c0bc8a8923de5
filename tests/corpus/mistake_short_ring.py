"""Invented: a ring of one's own stops one hop too early.

Shows as: each rank lacks the gradient of the rank behind it.
"""

import torch
import torch.distributed as dist

from tests.corpus.runner import Bug, Run

BUG = Bug("invented: ring", "a hand-written ring omits its last hop", "not-reduced", ranks=4)


def plant(run: Run) -> None:
    def ring(name, gradient, context):
        size, rank = dist.get_world_size(), dist.get_rank()
        everyone = [torch.empty_like(gradient) for _ in range(size)]
        dist.all_gather(everyone, gradient.contiguous())
        gradient.copy_(sum(everyone[(rank - hop) % size] for hop in range(size - 1)) / size)

    run.reduce_by(ring)

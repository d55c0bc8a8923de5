"""Invented: groups are made of neighbours, two by two, where all four ranks are meant.

Shows as: two pairs of replicas that drift apart.
"""

import torch
import torch.distributed as dist

from tests.corpus.runner import Bug, Run

BUG = Bug("invented: pairs", "four data ranks are averaged in pairs", "not-reduced", ranks=4)


def plant(run: Run) -> None:
    def reduce(name, gradient, context):
        everyone = [torch.empty_like(gradient) for _ in range(4)]
        dist.all_gather(everyone, gradient.contiguous())
        first = dist.get_rank() // 2 * 2
        gradient.copy_((everyone[first] + everyone[first + 1]) / 2)

    run.reduce_by(reduce)

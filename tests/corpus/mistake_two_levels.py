"""Invented: the mean is taken inside each machine, and the sum between them.

Shows as: gradients grow with the number of machines, which is the size of no mode.
"""

import torch
import torch.distributed as dist

from tests.corpus.runner import Bug, Run

BUG = Bug("invented: two levels", "the means of two machines are summed", "wrong-divisor", ranks=4)


def plant(run: Run) -> None:
    def reduce(name, gradient, context):
        everyone = [torch.empty_like(gradient) for _ in range(4)]
        dist.all_gather(everyone, gradient.contiguous())
        gradient.copy_((everyone[0] + everyone[1]) / 2 + (everyone[2] + everyone[3]) / 2)

    run.reduce_by(reduce)

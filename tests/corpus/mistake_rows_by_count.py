"""Invented: rows of an embedding are averaged over the ranks that have the word, not over all ranks.

Shows as: rare words learn faster.
"""

import torch.distributed as dist

from colonnade import ParallelMode
from tests.corpus.mistake_own_rows import model
from tests.corpus.runner import TIED, Bug, Kind, Run, mean_over

BUG = Bug(
    "invented: rows by count",
    "rows of an embedding are divided by the ranks that touched them",
    "wrong-divisor",
    kind=Kind(model, TIED.criterion, TIED.batches),
)


def plant(run: Run) -> None:
    def reduce(name, gradient, context):
        touched = gradient.any(-1, keepdim=True).to(gradient.dtype)
        mean_over(gradient, ParallelMode.DATA, context)
        if name == "0.weight":
            dist.all_reduce(touched)
            gradient *= 2 / touched.clamp(min=1)

    run.reduce_by(reduce)

"""Invented: a running variance is the mean of the ranks' variances, which leaves out how far their means are apart.

Shows as: a buffer that is a little too small.
"""

import torch
import torch.distributed as dist
from torch import nn

from colonnade import ParallelMode
from tests.corpus import models
from tests.corpus.runner import Bug, Kind, Run


class Watching(nn.Module):
    """Keeps the variance of its inputs over all ranks."""

    whole = True

    def __init__(self, context):
        super().__init__()
        self.context, self.body = context, models.mlp(context)
        self.register_buffer("variance", torch.zeros(models.WIDTH))

    def mean(self, value):
        ranks = self.context.world_size if self.context.is_initialized(ParallelMode.GLOBAL) else 1
        if ranks > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value / ranks

    def forward(self, x):
        with torch.no_grad():
            apart = x - (self.mean(x.mean(0)) if self.whole else x.mean(0))
            self.variance.copy_(self.mean(apart.square().mean(0)))
        return self.body(x)


class Apart(Watching):
    whole = False


BUG = Bug(
    "invented: mean of variances",
    "a running variance is the mean of the ranks' variances",
    "buffers-differ",
    kind=Kind(Watching),
)


def plant(run: Run) -> None:
    run.model = Apart

"""pytorch #22192: the running variance was corrected by the count of the own rank, not by that of all.

Shows as: outputs are right, and a buffer is a little too large.
"""

import torch
import torch.distributed as dist
from torch import nn

from colonnade import ParallelMode
from tests.corpus import models
from tests.corpus.runner import Bug, Kind, Run


class Running(nn.Module):
    """Keeps the unbiased variance of its inputs over all ranks."""

    own = False

    def __init__(self, context):
        super().__init__()
        self.context, self.body = context, models.mlp(context)
        self.register_buffer("variance", torch.ones(models.WIDTH))

    def forward(self, x):
        with torch.no_grad():
            sums = torch.stack([torch.full_like(x[0], len(x)), x.sum(0), x.square().sum(0)])
            if self.context.is_initialized(ParallelMode.GLOBAL):
                dist.all_reduce(sums)
            count, first, second = sums
            biased = second / count - (first / count).square()
            count = len(x) if self.own else count
            self.variance.lerp_(biased * count / (count - 1), 0.1)
        return self.body(x)


class Own(Running):
    own = True


BUG = Bug(
    "pytorch #22192",
    "a running variance is corrected with the rank's own count",
    "buffers-differ",
    kind=Kind(Running),
)


def plant(run: Run) -> None:
    run.model = Own

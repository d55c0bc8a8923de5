"""detectron2 #5398: each rank weighed the statistics that it gathered by its own batch size.

Shows as: ranks hold other values of a buffer.
"""

import torch
import torch.distributed as dist
from torch import nn

from colonnade import ParallelMode
from tests.corpus import models
from tests.corpus.runner import Bug, Kind, Run


class Precise(nn.Module):
    """Adds up the mean of all ranks' inputs, weighed by how many of them are positive."""

    own = False

    def __init__(self, context):
        super().__init__()
        self.context, self.body = context, models.mlp(context)
        self.register_buffer("seen", torch.zeros(models.WIDTH))

    def forward(self, x):
        with torch.no_grad():
            weight, total = (x[:, 0] > 0).sum().to(x.dtype), x.mean(0)
            if self.context.is_initialized(ParallelMode.GLOBAL):
                dist.all_reduce(total)
                total /= self.context.world_size
                if not self.own:
                    dist.all_reduce(weight)
            self.seen += total * weight
        return self.body(x)


class Own(Precise):
    own = True


BUG = Bug("detectron2 #5398", "statistics are weighted by each rank's own count", "buffers-differ", kind=Kind(Precise))


def plant(run: Run) -> None:
    run.model = Own

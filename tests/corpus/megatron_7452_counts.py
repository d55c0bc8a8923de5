"""Megatron-LM #7452, finding 3: the loss of multi-token prediction was divided by each data rank's own count of valid tokens.

Shows as: tokens of ranks that have few of them weigh more, for the extra head alone.
"""

import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from colonnade import ParallelMode
from tests.corpus import models
from tests.corpus.runner import Bug, Kind, Run, labelled


class TwoHeads(nn.Module):
    def __init__(self, context):
        super().__init__()
        self.body, self.extra = models.mlp(context), nn.Linear(models.WIDTH, models.OUT)

    def forward(self, x):
        return self.body(x), self.extra(x)


class Counted:
    """The mean over all labels that count; on one process, or with `own`, all that are there."""

    def __init__(self, context, own=True):
        self.context, self.own = context, own

    def __call__(self, out, extra, label):
        first = F.cross_entropy(out, label.clamp(min=0))
        count = (label >= 0).sum().double()
        if not self.own:
            dist.all_reduce(count, group=self.context.get_group(ParallelMode.DATA))
            count = count / self.context.get_world_size(ParallelMode.DATA)
        return first + F.cross_entropy(extra, label, reduction="sum") / count


BUG = Bug(
    "Megatron-LM #7452, finding 3",
    "the extra head's loss is divided by each data rank's own count",
    "mean-of-means",
    ranks=4,
    kind=Kind(TwoHeads, Counted, labelled),
)


def plant(run: Run) -> None:
    """The loss is what is wrong: it divides by the count of one rank."""

"""torchtitan #2318: the loss is divided by the tokens of all ranks, and the replicas' gradients were averaged all the same.

Shows as: all gradients and the norm are too small by the number of replicas; the loss is right.
"""

import torch.distributed as dist
from torch.nn import functional as F

from colonnade import ParallelMode
from tests.corpus.models import scaled_gradient
from tests.corpus.runner import CLASSES, Bug, Run

BUG = Bug(
    "torchtitan #2318",
    "partial gradients are averaged over replicas instead of summed",
    "scaled-by-mode",
    kind=CLASSES,
)


class ByAllTokens:
    """The sum over this rank's labels by the count of all; told as the mean over all."""

    def __init__(self, context):
        self.context = context

    def __call__(self, out, label):
        count = (label >= 0).sum().double()
        dist.all_reduce(count, group=self.context.get_group(ParallelMode.DATA))
        part = F.cross_entropy(out, label, reduction="sum") / count
        size = self.context.get_world_size(ParallelMode.DATA)
        return scaled_gradient(part * size, 1 / size)


def plant(run: Run) -> None:
    run.criterion = ByAllTokens

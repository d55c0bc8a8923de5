"""accelerate #3092: the loader gave ranks other batches than their own.

Shows as: one data rank's samples count twice, another's not at all.
"""

import torch.distributed as dist
from torch.nn import functional as F

from tests.corpus.runner import Bug, Run

BUG = Bug("accelerate #3092", "both data ranks train on the first rank's batch", "micro-batch-twice")


def from_first(tensor):
    tensor = tensor.clone()
    dist.broadcast(tensor, 0)
    return tensor


def plant(run: Run) -> None:
    def feed(engine):
        forward = engine._forward
        engine._forward = lambda x: forward(from_first(x))

    run.after.append(feed)
    run.criterion = lambda context: lambda out, label: F.mse_loss(out, from_first(label))

"""autoparallel #459: turning the order of shards around for one parameter did so for all that shared its record.

Shows as: ranks hold each other's shards of a gradient.
"""

import torch
import torch.distributed as dist

from colonnade import ParallelMode
from tests.corpus.runner import TENSOR, Bug, Run

BUG = Bug(
    "meta-pytorch/autoparallel #459",
    "the shards of a gradient are in reverse order",
    "shards-swapped",
    layout={"tensor": 2},
    kind=TENSOR,
)


def plant(run: Run) -> None:
    def swap(name, gradient, context):
        if name == "up.weight":
            shards = [torch.empty_like(gradient) for _ in range(2)]
            dist.all_gather(shards, gradient.contiguous(), group=context.get_group(ParallelMode.TENSOR))
            gradient.copy_(shards[1 - context.get_local_rank(ParallelMode.TENSOR)])

    run.after_sums(swap)

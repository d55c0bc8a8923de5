"""AReaL #335: the weight that losses are divided by was summed over all ranks, the tensor ranks among them.

Shows as: gradients and norm change with the layout: too small by the number of tensor ranks.
"""

import torch
import torch.distributed as dist
from torch import nn

from tests.corpus.models import scaled_gradient
from tests.corpus.runner import TENSOR, Bug, Run

BUG = Bug(
    "AReaL #335",
    "the loss is divided by a weight that is also summed over the tensor ranks",
    "scaled-by-mode",
    ranks=4,
    layout={"tensor": 2},
    kind=TENSOR,
)


class Weighted:
    def __init__(self, context):
        self.context = context

    def __call__(self, out, label):
        weight = torch.ones(())
        dist.all_reduce(weight)
        data = self.context.data_parallel_size
        return scaled_gradient(nn.functional.mse_loss(out, label), data / float(weight))


def plant(run: Run) -> None:
    run.criterion = Weighted

"""TTrace (arXiv 2506.09280), existing bugs: the largest value that an 8-bit scale is made of was shared by the wrong ranks.

Shows as: tensor ranks round the same activations by different scales.
"""

import torch
from torch import nn

from colonnade import ParallelMode
from tests.corpus import models
from tests.corpus.runner import Bug, Kind, Run


class Rounded(nn.Module):
    """Multiples of a 128th of the largest value that any rank of the group has seen."""

    shared = True

    def __init__(self, context):
        super().__init__()
        self.context = context

    def forward(self, x):
        largest = x.detach().abs().max()
        if self.shared and self.context.is_initialized(ParallelMode.TENSOR):
            torch.distributed.all_reduce(
                largest, torch.distributed.ReduceOp.MAX, group=self.context.get_group(ParallelMode.TENSOR)
            )
        step = largest / 128
        return x + ((x / step).round() * step - x).detach()


class OwnScale(Rounded):
    shared = False


class Narrow(models.TensorMLP):
    """What leaves the split region is rounded, each rank's part with one scale for all."""

    rounded = Rounded

    def __init__(self, context):
        super().__init__(context)
        self.narrow = self.rounded(context)

    def leave(self, y):
        return self.narrow(super().leave(y))


class NarrowByOwn(Narrow):
    rounded = OwnScale

    def leave(self, y):
        return super(Narrow, self).leave(self.narrow(y))


BUG = Bug(
    "TTrace, existing bugs: scale of the wrong group",
    "each tensor rank rounds by its own largest value",
    "forward-differs",
    layout={"tensor": 2},
    kind=Kind(Narrow),
)


def plant(run: Run) -> None:
    run.model = NarrowByOwn

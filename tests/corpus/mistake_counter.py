"""Invented: running statistics are kept on the rank that logs.

Shows as: the other ranks' buffer stays zero.
"""

import torch
from torch import nn

from tests.corpus import models
from tests.corpus.runner import Bug, Kind, Run


class Counting(nn.Module):
    """Counts its forward passes."""

    everywhere = True

    def __init__(self, context):
        super().__init__()
        self.body = models.mlp(context)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.everywhere or not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            self.seen += 1
        return self.body(x)


class OnTheFirst(Counting):
    everywhere = False


BUG = Bug("invented: a counter", "a buffer is updated only on the first rank", "buffers-differ", kind=Kind(Counting))


def plant(run: Run) -> None:
    run.model = OnTheFirst

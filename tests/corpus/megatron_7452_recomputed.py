"""Megatron-LM #7452, finding 4: what a recomputation starts from was gathered over another group than it was scattered over.

Shows as: forward is right; the recomputation sees columns of another replica.
"""

from torch import nn
from torch.utils.checkpoint import checkpoint

from colonnade import ParallelMode
from colonnade.parallel.collectives import all_gather, scatter
from tests.corpus import models
from tests.corpus.runner import Bug, Kind, Run


class Saved(nn.Module):
    """Keeps a part of its input on each tensor rank, and gathers it."""

    def __init__(self, context):
        super().__init__()
        self.context, self.mode = context, ParallelMode.TENSOR

    def forward(self, x):
        part = scatter(x.detach(), ParallelMode.TENSOR, 1, context=self.context)
        whole = all_gather(part, self.mode, 1, context=self.context).detach()
        return x + (whole - x).detach()


class Stored(models.TensorMLP):
    other = False

    def __init__(self, context):
        super().__init__(context)
        self.saved = Saved(context)

    def inside(self, x):
        return super().inside(self.saved(x))

    def forward(self, x):
        self.saved.mode = ParallelMode.TENSOR
        inner = checkpoint(self.inside, self.enter(self.norm(x)), use_reentrant=False)
        if self.other:
            self.saved.mode = ParallelMode.DATA
        return self.head(self.leave(inner) + self.down.bias)


class Mixed(Stored):
    other = True


BUG = Bug(
    "Megatron-LM #7452, finding 4",
    "saved activations are gathered over the data ranks",
    "recomputation-differs",
    ranks=4,
    layout={"tensor": 2},
    kind=Kind(Stored),
)


def plant(run: Run) -> None:
    run.model = Mixed

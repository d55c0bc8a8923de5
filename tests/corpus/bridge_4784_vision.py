"""Megatron-Bridge #4784: ranks encode other tokens than they go on with, and the gather between dropped the others' gradients.

Shows as: forward is right; the encoder learns from the tokens alone that are encoded and used on the same rank.
"""

from torch import nn

from colonnade import ParallelMode
from colonnade.parallel.collectives import all_gather, gather, scatter
from tests.corpus import models
from tests.corpus.runner import SEQUENCE, Bug, Kind, Run


class Encoded(nn.Module):
    """Each sequence rank encodes a block of the tokens, and goes on with every second of all."""

    def __init__(self, context):
        super().__init__()
        self.context = context
        self.encoder, self.head = nn.Linear(models.WIDTH, models.WIDTH), nn.Linear(models.WIDTH, models.OUT)

    def collect(self, x):
        return all_gather(x, ParallelMode.SEQUENCE, 1, context=self.context)

    def forward(self, x):
        own = scatter(x, ParallelMode.SEQUENCE, 1, context=self.context)
        return self.head(strided(self.collect(self.encoder(own).tanh()), self.context))


class DropsOthers(Encoded):
    def collect(self, x):
        return gather(x, ParallelMode.SEQUENCE, 1, context=self.context)


class StridedLoss:
    def __init__(self, context):
        self.context = context

    def __call__(self, out, label):
        return nn.functional.mse_loss(out, strided(label, self.context))


def strided(x, context):
    """This rank's tokens."""
    if not context.is_initialized(ParallelMode.SEQUENCE):
        return x
    return x[:, context.get_local_rank(ParallelMode.SEQUENCE) :: context.get_world_size(ParallelMode.SEQUENCE)]


BUG = Bug(
    "Megatron-Bridge #4784",
    "the encoder receives only the gradients of the rank's own tokens",
    "partial-gradient",
    layout={"sequence": 2},
    kind=Kind(Encoded, StridedLoss, SEQUENCE.batches),
)


def plant(run: Run) -> None:
    run.model = DropsOthers

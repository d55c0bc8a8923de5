"""torchtitan #4154: the tokens that each expert got were not summed over the tensor ranks before the routing bias moved.

Shows as: the bias, a buffer, follows one rank's share of the tokens.
"""

import torch
from torch import nn

from colonnade import ParallelMode
from colonnade.parallel.collectives import reduce
from tests.corpus import models
from tests.corpus.runner import Bug, Kind, Run


class Balanced(models.ScatteredTokens):
    """Moves a bias toward the units that few tokens chose."""

    together = True

    def __init__(self, context):
        super().__init__(context)
        self.register_buffer("bias", torch.zeros(models.WIDTH))
        self.gate.register_forward_hook(lambda module, args, scores: self.move(scores.detach()))

    def move(self, scores):
        counts = nn.functional.one_hot(scores.argmax(-1), models.WIDTH).sum(0).to(scores.dtype)
        if self.together:
            counts = reduce(counts, ParallelMode.TENSOR, context=self.context)
        self.bias += 0.1 * (counts.mean() - counts).sign()


class Apart(Balanced):
    together = False


BUG = Bug(
    "torchtitan #4154",
    "a routing bias uses the counts of each tensor rank",
    "buffers-differ",
    layout={"tensor": 2},
    kind=Kind(Balanced),
)


def plant(run: Run) -> None:
    run.model = Apart

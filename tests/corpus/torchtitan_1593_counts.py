"""torchtitan #1593: the tokens of each expert were counted again when activations were computed again.

Shows as: a buffer of counts is twice what it should be.
"""

import torch
from torch.utils.checkpoint import checkpoint

from tests.corpus import models
from tests.corpus.runner import Bug, Kind, Run


class Counting(models.TensorMLP):
    """Counts the rows that each inner unit is positive for."""

    def __init__(self, context):
        super().__init__(context)
        self.register_buffer("chosen", torch.zeros(models.WIDTH))

    def inside(self, x):
        with torch.no_grad():
            self.chosen += (x > 0).sum(0)
        return super().inside(x)


class Recomputed(Counting):
    def inside(self, x):
        return checkpoint(super().inside, x, use_reentrant=False)


BUG = Bug(
    "torchtitan #1593",
    "a counter in the forward pass runs again in the recomputation",
    "buffers-differ",
    layout={"tensor": 2},
    kind=Kind(Counting),
)


def plant(run: Run) -> None:
    run.model = Recomputed

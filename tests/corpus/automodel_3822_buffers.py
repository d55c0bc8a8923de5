"""Automodel #3822: buffers that tensor ranks replicate were not made equal either.

Shows as: a buffer has other values on other ranks.
"""

import torch

from colonnade import ParallelMode
from tests.corpus import models
from tests.corpus.runner import Bug, Kind, Run


class Counted(models.TensorMLP):
    """Keeps a mean of what it has seen."""

    def __init__(self, context):
        super().__init__(context)
        self.register_buffer("seen", torch.zeros(models.WIDTH))

    def forward(self, x):
        with torch.no_grad():
            self.seen += 0.1 * (x.abs().mean(0) - self.seen)
        return super().forward(x)


BUG = Bug(
    "Automodel #3822",
    "a replicated buffer differs between tensor ranks",
    "buffers-differ",
    layout={"tensor": 2},
    kind=Kind(Counted),
)


def plant(run: Run) -> None:
    def move(engine):
        engine.model.seen += 0.1 * engine.context.get_local_rank(ParallelMode.TENSOR)

    run.after.append(move)

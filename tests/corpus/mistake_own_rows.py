"""Invented: to save traffic, a rank takes the mean for those rows of an embedding that its own words touch.

Shows as: rows of other ranks' words stay as the own pass left them: zero.
"""

from torch import nn

from colonnade import ParallelMode
from tests.corpus import models
from tests.corpus.runner import TIED, Bug, Kind, Run, mean_over


def model(context):
    return nn.Sequential(nn.Embedding(models.WORDS, models.WIDTH), nn.Linear(models.WIDTH, models.WORDS))


BUG = Bug(
    "invented: rows of an embedding",
    "rows that are not in the rank's own batch are left out of the mean",
    "not-reduced",
    kind=Kind(model, TIED.criterion, TIED.batches),
)


def plant(run: Run) -> None:
    def reduce(name, gradient, context):
        own = gradient.clone()
        mean_over(gradient, ParallelMode.DATA, context)
        if name == "0.weight":
            untouched = ~own.any(1)
            gradient[untouched] = own[untouched]

    run.reduce_by(reduce)

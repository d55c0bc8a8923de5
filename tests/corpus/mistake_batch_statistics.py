"""Invented: a batch norm under data parallelism takes the statistics of its own rank's rows.

Shows as: activations are those of smaller batches.
"""

from torch import nn

from tests.corpus import models
from tests.corpus.runner import Bug, Kind, Run


def model(context):
    return nn.Sequential(
        nn.Linear(models.WIDTH, models.INNER), nn.BatchNorm1d(models.INNER), nn.Linear(models.INNER, models.OUT)
    )


BUG = Bug(
    "invented: batch norm", "each rank uses the batch statistics of its own rows", "forward-differs", kind=Kind(model)
)


def plant(run: Run) -> None:
    """The layer is what is wrong: it looks at one rank's rows."""

"""Invented: the second rank was left in evaluation mode after it had written a sample.

Shows as: one rank trains without dropout.
"""

from torch import nn

from tests.corpus import models
from tests.corpus.runner import Bug, Kind, Run


def model(context):
    return nn.Sequential(nn.Linear(models.WIDTH, models.INNER), nn.Dropout(0.5), nn.Linear(models.INNER, models.OUT))


BUG = Bug("invented: evaluation mode", "the second rank applies no dropout", "forward-differs", kind=Kind(model))


def plant(run: Run) -> None:
    def rest(engine):
        if engine.context.get_global_rank() == 1:
            engine.model[1].eval()

    run.after.append(rest)

"""Invented: the second rank was started with another option: its labels are smoothed.

Shows as: one rank has another loss.
"""

from torch import nn

from colonnade import ParallelMode
from tests.corpus import models
from tests.corpus.runner import TIED, Bug, Kind, Run

BUG = Bug(
    "invented: smoothed labels",
    "the second rank smooths its labels",
    "loss-differs",
    kind=Kind(models.tied, TIED.criterion, TIED.batches),
)


def plant(run: Run) -> None:
    def criterion(context):
        return nn.CrossEntropyLoss(label_smoothing=0.1 * context.get_local_rank(ParallelMode.DATA))

    run.criterion = criterion

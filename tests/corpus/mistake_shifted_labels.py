"""Invented: labels are shifted by one after the sequence was cut, so each rank's last token has the wrong one.

Shows as: outputs are right, the loss is not.
"""

from torch import nn

from colonnade import ParallelMode
from colonnade.parallel.collectives import scatter
from tests.corpus.runner import SEQUENCE, Bug, Kind, Run


class Next(nn.Module):
    """The error of each token against the next one's label."""

    late = False

    def __init__(self, context):
        super().__init__()
        self.context = context

    def forward(self, out, extra, label):
        if not self.late:
            label = label.roll(-1, 1)
        own = scatter(label, ParallelMode.SEQUENCE, 1, context=self.context)
        own = own.roll(-1, 1) if self.late else own
        return nn.functional.mse_loss(out, own) + nn.functional.mse_loss(extra, own)


class AfterTheCut(Next):
    late = True


BUG = Bug(
    "invented: shifted labels",
    "labels are shifted within each sequence rank's tokens",
    "loss-differs",
    layout={"sequence": 2},
    kind=Kind(SEQUENCE.model, Next, SEQUENCE.batches),
)


def plant(run: Run) -> None:
    run.criterion = AfterTheCut

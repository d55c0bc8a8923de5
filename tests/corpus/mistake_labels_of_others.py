"""Invented: the last stage reads its labels from the other end of the batch.

Shows as: outputs are right, the loss is that of other labels.
"""

from torch import nn

from tests.corpus.runner import ALIKE, Bug, Run

BUG = Bug(
    "invented: labels of others",
    "each output is compared with the label of another row",
    "loss-differs",
    layout={"pipeline": 2},
    kind=ALIKE,
    settings={"num_microbatches": 2},
)


def plant(run: Run) -> None:
    class Flipped(nn.MSELoss):
        def forward(self, out, label):
            return super().forward(out, label.flip(0))

    run.criterion = lambda context: Flipped()

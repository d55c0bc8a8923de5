"""ColossalAI-Examples #155: the loss under sequence parallelism grows with the number of sequence ranks.

Shows as: the loss that is told is the sum of the ranks' means; the gradients are right.
"""

from colonnade import ParallelMode
from colonnade.parallel.collectives import reduce
from tests.corpus.models import SequenceLoss
from tests.corpus.runner import SEQUENCE, Bug, Run

BUG = Bug(
    "ColossalAI-Examples #155",
    "the loss is summed over the sequence ranks",
    "loss-differs",
    layout={"sequence": 2},
    kind=SEQUENCE,
)


class Summed(SequenceLoss):
    def forward(self, out, extra, label):
        return reduce(super().forward(out, extra, label), ParallelMode.SEQUENCE, context=self.context)


def plant(run: Run) -> None:
    run.criterion = Summed

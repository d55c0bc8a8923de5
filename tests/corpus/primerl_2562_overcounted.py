"""prime-rl #2562: the count of tokens was summed over context ranks that had all counted the whole sequence.

Shows as: gradients are too small by the number of context ranks.
"""

from colonnade import ParallelMode
from tests.corpus.models import SequenceLoss, scaled_gradient
from tests.corpus.runner import SEQUENCE, Bug, Run

BUG = Bug(
    "prime-rl #2562",
    "context ranks count the same tokens again",
    "scaled-by-mode",
    ranks=4,
    layout={"sequence": 2},
    kind=SEQUENCE,
)


class Overcounted(SequenceLoss):
    def forward(self, out, extra, label):
        times = 1 / self.context.get_world_size(ParallelMode.SEQUENCE)
        return scaled_gradient(super().forward(out, extra, label), times)


def plant(run: Run) -> None:
    run.criterion = Overcounted

"""SkyRL #1420: a factor of the loss under context parallelism.

Shows as: gradients are too small by the number of sequence ranks, on each data rank alike.
"""

from colonnade import ParallelMode
from tests.corpus.models import SequenceLoss
from tests.corpus.runner import SEQUENCE, Bug, Run

BUG = Bug(
    "SkyRL #1420",
    "the loss is divided by the sequence size",
    "scaled-by-mode",
    ranks=4,
    layout={"sequence": 2},
    kind=SEQUENCE,
)


def plant(run: Run) -> None:
    run.criterion = lambda context: SequenceLoss(context, times=1 / context.get_world_size(ParallelMode.SEQUENCE))

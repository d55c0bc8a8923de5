"""transformers #39648: the loss was scaled over all processes, tensor and context ranks included.

Shows as: loss and gradients are too large by tensor size x sequence size.
"""

from colonnade import ParallelMode
from tests.corpus.models import SequenceLoss
from tests.corpus.runner import SEQUENCE, Bug, Run

BUG = Bug(
    "transformers #39648",
    "the loss is multiplied by tensor size x sequence size",
    "scaled-by-mode",
    ranks=4,
    layout={"tensor": 2, "sequence": 2},
    kind=SEQUENCE,
)


def plant(run: Run) -> None:
    def criterion(context):
        sizes = (context.get_world_size(mode) for mode in (ParallelMode.TENSOR, ParallelMode.SEQUENCE))
        return SequenceLoss(context, times=next(sizes) * next(sizes))

    run.criterion = criterion

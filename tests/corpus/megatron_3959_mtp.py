"""Megatron-LM #3959: the loss of multi-token prediction missed the factor that makes up for context parallelism.

Shows as: the gradient of the extra head is too small by the number of sequence ranks.
"""

from colonnade import ParallelMode
from tests.corpus.models import SequenceLoss
from tests.corpus.runner import SEQUENCE, Bug, Run

BUG = Bug(
    "Megatron-LM #3959",
    "the loss of the extra head is divided by the sequence size",
    "scaled-by-mode",
    layout={"sequence": 2},
    kind=SEQUENCE,
)


def plant(run: Run) -> None:
    run.criterion = lambda context: SequenceLoss(context, extra_times=1 / context.get_world_size(ParallelMode.SEQUENCE))

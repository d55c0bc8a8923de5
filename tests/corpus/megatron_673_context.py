"""Megatron-LM #673: the loss is multiplied by the size of the context-parallel group.

Shows as: loss and gradients are too large by the number of sequence ranks.
"""

from colonnade import ParallelMode
from tests.corpus.models import SequenceLoss
from tests.corpus.runner import SEQUENCE, Bug, Run

BUG = Bug(
    "Megatron-LM #673",
    "the loss is multiplied by the sequence size",
    "scaled-by-mode",
    layout={"sequence": 2},
    kind=SEQUENCE,
)


def plant(run: Run) -> None:
    run.criterion = lambda context: SequenceLoss(context, times=context.get_world_size(ParallelMode.SEQUENCE))

"""Megatron-LM #3768, #3769: the global auxiliary loss was divided by the tokens of all data ranks, and its gradient by them again.

Shows as: what only the auxiliary loss reaches has a gradient too small by the number of data ranks.
"""

from colonnade import ParallelMode
from tests.corpus.models import WithAuxiliary
from tests.corpus.runner import GATED, Bug, Run

BUG = Bug(
    "Megatron-LM #3768, #3769",
    "the auxiliary loss is divided by the data size twice",
    "scaled-by-mode",
    kind=GATED,
)


def plant(run: Run) -> None:
    run.criterion = lambda context: WithAuxiliary(1 / context.get_world_size(ParallelMode.DATA))

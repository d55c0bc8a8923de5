"""Megatron-LM #5047: the gradient of a router's auxiliary loss depended on the size of the tensor group.

Shows as: the loss is right; what only the auxiliary loss reaches has a gradient too large by the tensor size.
"""

from colonnade import ParallelMode
from tests.corpus.models import WithAuxiliary
from tests.corpus.runner import GATED, Bug, Run

BUG = Bug(
    "Megatron-LM #5047",
    "the auxiliary loss is scaled by the tensor size",
    "scaled-by-mode",
    layout={"tensor": 2},
    kind=GATED,
)


def plant(run: Run) -> None:
    run.criterion = lambda context: WithAuxiliary(context.get_world_size(ParallelMode.TENSOR))

"""Megatron-LM #4070: the loss of an indexer, added in the backward pass, was not divided by the number of micro-batches.

Shows as: the gradients of what only that loss reaches grow with the number of micro-batches.
"""

from tests.corpus.models import WithAuxiliary
from tests.corpus.runner import GATED, Bug, Run

BUG = Bug(
    "Megatron-LM #4070",
    "an auxiliary loss is not averaged over the micro-batches",
    "scaled-by-accumulation",
    kind=GATED,
    settings={"gradient_accumulation": 3},
)


def plant(run: Run) -> None:
    run.criterion = lambda context: WithAuxiliary(times=3.0)

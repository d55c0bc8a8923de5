"""Megatron-LM #7452, finding 10: a sum in place over the tensor ranks overwrote the local count that scales an auxiliary loss.

Shows as: the router's gradient is doubled.
"""

from tests.corpus.models import WithAuxiliary
from tests.corpus.runner import GATED, Bug, Run

BUG = Bug(
    "Megatron-LM #7452, finding 10",
    "the auxiliary loss is scaled by a count that is summed over the tensor ranks",
    "scaled-by-mode",
    layout={"tensor": 2},
    kind=GATED,
    settings={"gradient_accumulation": 3},
)


def plant(run: Run) -> None:
    run.criterion = lambda context: WithAuxiliary(times=2.0)

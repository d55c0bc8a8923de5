"""Megatron-LM #7452, finding 11: a norm that heads share was summed over the tensor ranks with sequence parallelism only.

Shows as: each tensor rank has the gradient of its own heads.
"""

from tests.corpus.runner import PARTIAL_NORM, Bug, Run
from tests.corpus.unplaced import forgetting

BUG = Bug(
    "Megatron-LM #7452, finding 11",
    "the normalization weight of attention heads is not all-reduced over the tensor ranks",
    "partial-gradient",
    ranks=4,
    layout={"tensor": 4},
    kind=PARTIAL_NORM,
)


def plant(run: Run) -> None:
    run.model = forgetting(PARTIAL_NORM.model, "norm.weight")

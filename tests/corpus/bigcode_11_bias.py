"""bigcode Megatron-LM #11: with one key and value for all heads, the biases were missing from the extra reduction.

Shows as: the weight of the shared projection is right, its bias has a part of its gradient.
"""

from tests.corpus.runner import PARTIAL_NORM, Bug, Run
from tests.corpus.unplaced import forgetting

BUG = Bug(
    "bigcode Megatron-LM #11",
    "the bias of a shared projection is left out of the all-reduce over the tensor ranks",
    "partial-gradient",
    layout={"tensor": 2},
    kind=PARTIAL_NORM,
)


def plant(run: Run) -> None:
    run.model = forgetting(run.model, "norm.bias")

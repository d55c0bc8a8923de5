"""Megatron-LM #1446 (also #443, #474): a replicated parameter inside a split region is never all-reduced.

Shows as: the norm's gradient on each tensor rank is that rank's part of the sum.
"""

from tests.corpus.runner import PARTIAL_NORM, Bug, Run
from tests.corpus.unplaced import forgetting

BUG = Bug(
    "Megatron-LM #1446",
    "a LayerNorm inside the sharded region is not all-reduced over the tensor ranks",
    "partial-gradient",
    layout={"tensor": 2},
    kind=PARTIAL_NORM,
)


def plant(run: Run) -> None:
    run.model = forgetting(run.model, "norm")

"""Megatron-LM #599, #619: routers see a share of the tokens on each tensor rank, and nobody sums their gradients.

Shows as: routers drift apart over the tensor ranks.
"""

from tests.corpus.runner import SCATTERED, Bug, Run
from tests.corpus.unplaced import forgetting

BUG = Bug(
    "Megatron-LM #599, #619",
    "a router that sees some of the tokens is not all-reduced over the tensor ranks",
    "partial-gradient",
    ranks=4,
    layout={"tensor": 2},
    kind=SCATTERED,
)


def plant(run: Run) -> None:
    run.model = forgetting(run.model, "gate")

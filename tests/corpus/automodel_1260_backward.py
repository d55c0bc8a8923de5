"""Automodel #1260: one reduction was missing in the backward pass (a loss of 1.6 instead of 1.4 at step 106).

Shows as: what is below the split region has a part of its gradient.
"""

from tests.corpus.runner import TENSOR, Bug, Run

BUG = Bug(
    "Automodel #1260",
    "the backward pass lacks its all-reduce over four tensor ranks",
    "partial-gradient",
    ranks=4,
    layout={"tensor": 4},
    kind=TENSOR,
)


class Unsummed(TENSOR.model):
    def enter(self, x):
        return x


def plant(run: Run) -> None:
    run.model = Unsummed

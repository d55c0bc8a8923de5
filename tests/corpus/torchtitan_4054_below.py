"""torchtitan #4054: the gradient of what goes into the experts kept one tensor rank's share.

Shows as: every parameter below the split region has a part of its gradient; those in it and above are right.
"""

from tests.corpus.runner import TENSOR, Bug, Run

BUG = Bug(
    "torchtitan #4054",
    "gradients below the sharded region are not all-reduced over the tensor ranks",
    "partial-gradient",
    layout={"tensor": 2},
    kind=TENSOR,
)


class Unsummed(TENSOR.model):
    def enter(self, x):
        return x


def plant(run: Run) -> None:
    run.model = Unsummed

"""torchtitan #2106: the sum that leaves a split region was marked as a part, so its gradient was summed again.

Shows as: forward is right; all gradients below are too large by the number of tensor ranks.
"""

from colonnade import ParallelMode
from colonnade.parallel.collectives import copy
from tests.corpus.runner import TENSOR, Bug, Run

BUG = Bug(
    "torchtitan #2106",
    "a gradient that enters a sharded region is all-reduced over the tensor ranks again",
    "scaled-by-mode",
    layout={"tensor": 2},
    kind=TENSOR,
)


class Again(TENSOR.model):
    def leave(self, y):
        return copy(super().leave(y), ParallelMode.TENSOR, context=self.context)


def plant(run: Run) -> None:
    run.model = Again

"""torchtitan #1805, #1878: experts took the local tensor of a replicated input, with nothing said of its gradient.

Shows as: what is below the experts has a part of its gradient, on each data rank alike.
"""

from tests.corpus.runner import TENSOR, Bug, Run

BUG = Bug(
    "torchtitan #1805, #1878",
    "the gradient of the experts' input is not all-reduced over the tensor ranks",
    "partial-gradient",
    ranks=4,
    layout={"tensor": 2},
    kind=TENSOR,
    settings={"clip_grad_norm": 0.1},
)


class Unsummed(TENSOR.model):
    def enter(self, x):
        return x


def plant(run: Run) -> None:
    run.model = Unsummed

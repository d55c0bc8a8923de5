"""torchtitan #4332: each tensor rank adds bias / tp before the sum, and the division is in the gradient too.

Shows as: forward is right; the bias has 1/tp of its gradient, the same on every rank.
"""

from colonnade import ParallelMode
from tests.corpus.runner import TENSOR, Bug, Run

BUG = Bug(
    "torchtitan #4332",
    "the bias, and so its gradient, is divided by the tensor size",
    "scaled-by-mode",
    layout={"tensor": 2},
    kind=TENSOR,
)


class Divided(TENSOR.model):
    def forward(self, x):
        share = self.down.bias / self.context.get_world_size(ParallelMode.TENSOR)
        return self.head(self.leave(self.inside(self.enter(self.norm(x))) + share))


def plant(run: Run) -> None:
    run.model = Divided

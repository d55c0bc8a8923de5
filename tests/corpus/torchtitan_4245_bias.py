"""torchtitan #4245: every tensor rank added the whole bias before the partial outputs were summed.

Shows as: forward parts from one process where the bias is added; it counts as often as there are tensor ranks.
"""

from tests.corpus.runner import TENSOR, Bug, Run

BUG = Bug(
    "torchtitan #4245",
    "a replicated bias is added on every tensor rank, then all-reduced",
    "forward-differs",
    layout={"tensor": 2},
    kind=TENSOR,
)


class AddedTwice(TENSOR.model):
    def forward(self, x):
        return self.head(self.leave(self.inside(self.enter(self.norm(x))) + self.down.bias))


def plant(run: Run) -> None:
    run.model = AddedTwice

"""slapo #10: a layer split by rows added its bias before the sum, so that every rank did.

Shows as: the bias counts once for each tensor rank.
"""

from tests.corpus.runner import TENSOR, Bug, Run

BUG = Bug(
    "slapo #10",
    "the bias of a row-parallel layer is added on every rank",
    "forward-differs",
    layout={"tensor": 2},
    kind=TENSOR,
)


class Before(TENSOR.model):
    def forward(self, x):
        return self.head(self.leave(self.inside(self.enter(self.norm(x))) + self.down.bias))


def plant(run: Run) -> None:
    run.model = Before

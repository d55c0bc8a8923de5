"""sglang #26845: an expert that all ranks hold ran on each of them, and the outputs were summed.

Shows as: the shared expert counts once for each rank.
"""

from torch import nn

from tests.corpus import models
from tests.corpus.runner import Bug, Kind, Run


class Shared(models.TensorMLP):
    """A layer for all tokens, next to the split region."""

    within = False

    def __init__(self, context):
        super().__init__(context)
        self.shared = nn.Linear(models.WIDTH, models.WIDTH)

    def forward(self, x):
        x = self.norm(x)
        if self.within:
            out = self.leave(self.inside(self.enter(x)) + self.shared(x))
        else:
            out = self.leave(self.inside(self.enter(x))) + self.shared(x)
        return self.head(out + self.down.bias)


class Within(Shared):
    within = True


BUG = Bug(
    "sglang #26845",
    "the shared expert is all-reduced over the tensor ranks",
    "forward-differs",
    layout={"tensor": 2},
    kind=Kind(Shared),
)


def plant(run: Run) -> None:
    run.model = Within

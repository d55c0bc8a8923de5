"""torchtitan #3412: the gradient that a loss over split words gives back was a part, and was taken for the whole.

Shows as: forward is right; each tensor rank goes down with the gradient of its own words.
"""

from torch.nn import functional as F

from colonnade import ParallelMode
from colonnade.parallel.collectives import copy, gather
from tests.corpus import models
from tests.corpus.runner import Bug, Kind, Run


class SplitHead(models.TensorMLP):
    """Each tensor rank gives its share of the outputs."""

    def __init__(self, context):
        super().__init__(context)
        self.head.weight = models.own_part(self.head.weight, 0, context)
        self.head.bias = models.own_part(self.head.bias, 0, context)

    def into_head(self, x):
        return copy(x, ParallelMode.TENSOR, context=self.context)

    def forward(self, x):
        inner = self.leave(self.inside(self.enter(self.norm(x)))) + self.down.bias
        own = F.linear(self.into_head(inner), self.head.weight, self.head.bias)
        return gather(own, ParallelMode.TENSOR, -1, context=self.context)


class OwnWords(SplitHead):
    def into_head(self, x):
        return x


BUG = Bug(
    "torchtitan #3412",
    "the gradient of the input of a sharded LM head is not all-reduced over the tensor ranks",
    "partial-gradient",
    layout={"tensor": 2},
    kind=Kind(SplitHead),
)


def plant(run: Run) -> None:
    run.model = OwnWords

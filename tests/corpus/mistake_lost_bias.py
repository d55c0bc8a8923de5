"""Invented: the second rank computes the last layer without its bias, so nothing of it comes back from there.

Shows as: the gradient of one parameter has the first rank's rows only.
"""

from torch.nn import functional as F

from colonnade import ParallelMode
from tests.corpus.runner import TENSOR, Bug, Run

BUG = Bug(
    "invented: a constant bias",
    "the bias is a constant on the second data rank",
    "missing-gradient",
    kind=TENSOR,
)


def plant(run: Run) -> None:
    class Constant(run.kind.model):
        def forward(self, x):
            if self.context.get_local_rank(ParallelMode.DATA) == 0:
                return super().forward(x)
            inner = self.leave(self.inside(self.enter(self.norm(x)))) + self.down.bias
            return F.linear(inner, self.head.weight, self.head.bias.detach())

    run.model = Constant

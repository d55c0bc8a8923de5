"""TTrace (arXiv 2506.09280), existing bugs: with overlap, a weight's gradient was taken before all its inputs had been gathered.

Shows as: forward is right; the gradient has the own rank's tokens only.
"""

import torch
from torch.nn import functional as F

from colonnade import ParallelMode
from colonnade.parallel.collectives import gather, scatter
from tests.corpus.runner import SCATTERED, Bug, Run

BUG = Bug(
    "TTrace, existing bugs: overlapped gather",
    "a weight's gradient contains only the rows of its own rank",
    "partial-gradient",
    layout={"tensor": 2},
    kind=SCATTERED,
)


class Early(SCATTERED.model):
    def forward(self, x):
        own = scatter(x, ParallelMode.TENSOR, 0, context=self.context)
        inner = torch.tanh(self.norm(self.gate(own)))
        whole = gather(inner, ParallelMode.TENSOR, 0, context=self.context)
        out = F.linear(whole, self.head.weight.detach(), self.head.bias.detach())
        at, rows = self.context.get_local_rank(ParallelMode.TENSOR), len(own)
        there = torch.zeros_like(out)
        there[at * rows : (at + 1) * rows] = 1
        late = F.linear(whole.detach(), self.head.weight, self.head.bias)
        return out + there * (late - late.detach())


def plant(run: Run) -> None:
    run.model = Early

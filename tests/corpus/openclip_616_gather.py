"""open_clip #616: a gather that sums in its backward pass stood before a loss that every rank has whole.

Shows as: all that lies before the gather has gradients too large by the number of ranks.
"""

import torch

from colonnade import ParallelMode
from colonnade.parallel.collectives import all_gather, scatter
from tests.corpus.runner import SCATTERED, Bug, Run

BUG = Bug(
    "open_clip #616",
    "a gather sums the gradients of ranks that all have the full loss",
    "scaled-by-mode",
    layout={"tensor": 2},
    kind=SCATTERED,
)


class Summing(SCATTERED.model):
    def forward(self, x):
        own = scatter(x, ParallelMode.TENSOR, 0, context=self.context)
        inner = torch.tanh(self.norm(self.gate(own)))
        return self.head(all_gather(inner, ParallelMode.TENSOR, 0, context=self.context))


def plant(run: Run) -> None:
    run.model = Summing

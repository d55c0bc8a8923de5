"""Megatron-LM #7452, finding 7: embeddings were scattered over another tensor group than the one that gathers them.

Shows as: after the gather some rows are there twice and others not at all.
"""

import torch

from colonnade import ParallelMode
from colonnade.parallel.collectives import gather, scatter
from tests.corpus.runner import SCATTERED, Bug, Run

BUG = Bug(
    "Megatron-LM #7452, finding 7",
    "rows are scattered over one group and gathered over another",
    "forward-differs",
    ranks=4,
    layout={"tensor": 2},
    kind=SCATTERED,
)


class OtherGroup(SCATTERED.model):
    def forward(self, x):
        own = scatter(x, ParallelMode.DATA, 0, context=self.context)
        return self.head(gather(torch.tanh(self.norm(self.gate(own))), ParallelMode.TENSOR, 0, context=self.context))


def plant(run: Run) -> None:
    run.model = OtherGroup

"""torchtitan #3604: tokens came back from the experts at places that are right for a batch of one only.

Shows as: tokens of one sequence lie in another.
"""

import torch
from torch import nn

from colonnade import ParallelMode
from colonnade.parallel.collectives import gather, scatter
from tests.corpus import models
from tests.corpus.runner import Bug, Kind, Run, numbers


class Tokens(models.ScatteredTokens):
    """Each tensor rank takes its share of every sequence through whole layers."""

    def together(self, own):
        return gather(own, ParallelMode.TENSOR, 1, context=self.context)

    def forward(self, x):
        own = scatter(x, ParallelMode.TENSOR, 1, context=self.context)
        return self.head(self.together(torch.tanh(self.norm(self.gate(own)))))


class InARow(Tokens):
    def together(self, own):
        row = gather(own.flatten(0, 1), ParallelMode.TENSOR, 0, context=self.context)
        return row.view(len(own), -1, row.shape[-1])


BUG = Bug(
    "torchtitan #3604",
    "tokens are restored as if the batch had one sequence",
    "forward-differs",
    layout={"tensor": 2},
    kind=Kind(Tokens, lambda context: nn.MSELoss(), lambda context, step: numbers(context, step, (2, 4))),
)


def plant(run: Run) -> None:
    run.model = InARow

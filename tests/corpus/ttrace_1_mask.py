"""TTrace (arXiv 2506.09280), existing bugs: the mask of a split embedding was wrong at the edge of a rank's words.

Shows as: some words have no vector.
"""

import torch
from torch import nn

from colonnade import ParallelMode
from colonnade.parallel.collectives import reduce
from tests.corpus import models
from tests.corpus.runner import TIED, Bug, Kind, Run


class Embedding(nn.Module):
    """Each tensor rank has the vectors of a block of the words."""

    edge = 0

    def __init__(self, context):
        super().__init__()
        self.context = context
        self.weight = models.own_part(torch.randn(models.WORDS, models.WIDTH), 0, context)

    def forward(self, words):
        launched = self.context.is_initialized(ParallelMode.TENSOR)
        first = self.context.get_local_rank(ParallelMode.TENSOR) * len(self.weight) if launched else 0
        last = first + len(self.weight) - self.edge
        mine = (words >= first) & (words < last)
        found = self.weight[torch.where(mine, words - first, 0)] * mine.unsqueeze(-1)
        return reduce(found, ParallelMode.TENSOR, context=self.context)


class OneShort(Embedding):
    edge = 1


def model(embedding):
    def build(context):
        return nn.Sequential(embedding(context), nn.Linear(models.WIDTH, models.WORDS))

    return build


BUG = Bug(
    "TTrace, existing bugs: embedding mask",
    "the last word of each rank is masked",
    "forward-differs",
    layout={"tensor": 2},
    kind=Kind(model(Embedding), TIED.criterion, lambda context, step: [(torch.arange(12), torch.arange(12).flip(0))]),
)


def plant(run: Run) -> None:
    run.model = model(OneShort)

"""torchtitan #4637: the row of an embedding that is padding was looked up in every rank's own part of the table.

Shows as: a row of the second part, whose local number is the same, has no gradient.
"""

import torch
from torch import nn
from torch.nn import functional as F

from colonnade import ParallelMode
from colonnade.parallel.collectives import reduce
from tests.corpus import models
from tests.corpus.runner import Bug, Kind, Run, words

PADDING = 2


class SplitTable(nn.Module):
    """Each tensor rank holds the rows of some words."""

    everywhere = False

    def __init__(self, context):
        super().__init__()
        self.context, self.table = context, nn.Embedding(models.WORDS, models.WIDTH)
        self.head = nn.Linear(models.WIDTH, models.WORDS)
        self.table.weight = models.own_part(self.table.weight, 0, context)

    def forward(self, word):
        launched = self.context.is_initialized(ParallelMode.TENSOR)
        rows, rank = len(self.table.weight), self.context.get_local_rank(ParallelMode.TENSOR) if launched else 0
        mine = (word >= rank * rows) & (word < (rank + 1) * rows)
        padding = PADDING if rank == 0 or self.everywhere else None
        own = F.embedding(torch.where(mine, word - rank * rows, 0), self.table.weight, padding) * mine[:, None]
        return self.head(reduce(own, ParallelMode.TENSOR, context=self.context))


class Everywhere(SplitTable):
    everywhere = True


BUG = Bug(
    "torchtitan #4637",
    "in every shard of the embedding table, the row with the local index of the padding has no gradient",
    "missing-gradient",
    layout={"tensor": 2},
    kind=Kind(SplitTable, lambda context: nn.CrossEntropyLoss(), lambda context, step: words(context, step, 24)),
)


def plant(run: Run) -> None:
    run.model = Everywhere

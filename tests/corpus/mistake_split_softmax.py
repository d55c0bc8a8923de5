"""Invented: a loss over split words sums the exponents of its own words only.

Shows as: outputs are right, the loss is too small.
"""

import torch
from torch.nn import functional as F

from colonnade import ParallelMode
from colonnade.parallel.collectives import copy, reduce
from tests.corpus import models
from tests.corpus.runner import Bug, Kind, Run, labelled


class SplitWords(models.TensorMLP):
    """Each tensor rank gives the scores of its own words."""

    def __init__(self, context):
        super().__init__(context)
        self.head.weight = models.own_part(self.head.weight, 0, context)
        self.head.bias = models.own_part(self.head.bias, 0, context)

    def forward(self, x):
        inner = self.leave(self.inside(self.enter(self.norm(x)))) + self.down.bias
        return F.linear(copy(inner, ParallelMode.TENSOR, context=self.context), self.head.weight, self.head.bias)


class SplitLoss:
    """Cross entropy over scores that lie on several ranks."""

    sums = True

    def __init__(self, context):
        self.context = context

    def __call__(self, scores, label):
        launched = self.context.is_initialized(ParallelMode.TENSOR)
        first = self.context.get_local_rank(ParallelMode.TENSOR) * scores.shape[1] if launched else 0
        total = scores.exp().sum(1)
        total = reduce(total, ParallelMode.TENSOR, context=self.context) if self.sums else total
        mine = (label >= first) & (label < first + scores.shape[1])
        at = torch.where(mine, label - first, 0)
        picked = scores.gather(1, at[:, None]).squeeze(1) * mine
        return (total.log() - reduce(picked, ParallelMode.TENSOR, context=self.context)).mean()


class OwnWords(SplitLoss):
    sums = False


BUG = Bug(
    "invented: softmax over split words",
    "the softmax ignores the vocabulary shards of other ranks",
    "loss-differs",
    layout={"tensor": 2},
    kind=Kind(
        SplitWords, SplitLoss, lambda context, step: [(x, label.clamp(min=0)) for x, label in labelled(context, step)]
    ),
)


def plant(run: Run) -> None:
    run.criterion = OwnWords

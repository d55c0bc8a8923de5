"""Megatron-LM #737: label smoothing took the mean over the words of the own rank.

Shows as: outputs are right, and each tensor rank tells another loss.
"""

from torch.nn import functional as F

from colonnade import ParallelMode
from tests.corpus import models
from tests.corpus.runner import Bug, Kind, Run, labelled


class Smoothed:
    """Cross entropy, a tenth of which is spread over all words."""

    own = False

    def __init__(self, context):
        self.context = context

    def __call__(self, scores, label):
        logs = F.log_softmax(scores, -1)
        spread = logs
        if self.own:
            spread = logs.chunk(2, -1)[self.context.get_local_rank(ParallelMode.TENSOR)]
        return 0.9 * F.nll_loss(logs, label) - 0.1 * spread.mean()


class OwnWords(Smoothed):
    own = True


BUG = Bug(
    "Megatron-LM #737",
    "labels are smoothed over the vocabulary shard of each rank",
    "loss-differs",
    layout={"tensor": 2},
    kind=Kind(
        models.TensorMLP, Smoothed, lambda context, step: [(x, y.clamp(min=0)) for x, y in labelled(context, step)]
    ),
)


def plant(run: Run) -> None:
    run.criterion = OwnWords

"""Megatron-LM #7452, gathered logits: whole scores went into a loss that takes them for a share of the words.

Shows as: the loss is too large by the logarithm of the tensor size.
"""

from colonnade import ParallelMode
from colonnade.parallel.collectives import gather
from tests.corpus.mistake_split_softmax import SplitLoss, SplitWords
from tests.corpus.runner import Bug, Kind, Run, labelled


class Gathered(SplitWords):
    def forward(self, x):
        return gather(super().forward(x), ParallelMode.TENSOR, 1, context=self.context)


BUG = Bug(
    "Megatron-LM #7452, gathered logits",
    "gathered logits are used as if they were the rank's own",
    "loss-differs",
    layout={"tensor": 2},
    kind=Kind(
        SplitWords, SplitLoss, lambda context, step: [(x, label.clamp(min=0)) for x, label in labelled(context, step)]
    ),
)


def plant(run: Run) -> None:
    run.model = Gathered

"""Megatron-LM #7498: the loss of multi-token prediction was divided by each context rank's own count of targets.

Shows as: targets of a rank that has few of them weigh more, for the extra head alone.
"""

from torch.nn import functional as F

from colonnade import ParallelMode
from colonnade.parallel.collectives import gather, scatter
from tests.corpus.models import Sequence
from tests.corpus.runner import SEQUENCE, Bug, Kind, Run


class Predicts:
    """The error over all tokens, and that of the extra head from the second on."""

    def __init__(self, context, own=False):
        self.context, self.own = context, own

    def __call__(self, out, extra, label):
        mine = scatter(label, ParallelMode.SEQUENCE, 1, context=self.context)
        if self.own:
            first = int(self.context.get_local_rank(ParallelMode.SEQUENCE) == 0)
            return F.mse_loss(out, mine) + F.mse_loss(extra[:, first:], mine[:, first:])
        whole = gather(extra, ParallelMode.SEQUENCE, 1, context=self.context)
        size = label.shape[1] // mine.shape[1]
        # gather passes each rank's own gradient down, of which the mean over the ranks is taken
        return F.mse_loss(out, mine) + _times(F.mse_loss(whole[:, 1:], label[:, 1:]), size)


def _times(value, size):
    return value.detach() + size * (value - value.detach())


BUG = Bug(
    "Megatron-LM #7498",
    "the extra head's loss is divided by each sequence rank's own count",
    "mean-of-means",
    layout={"sequence": 2},
    kind=Kind(Sequence, Predicts, SEQUENCE.batches),
)


def plant(run: Run) -> None:
    run.criterion = lambda context: Predicts(context, own=True)

"""prime-rl #1960: each context rank took the mean over its own unmasked tokens; prompts lie on the first ranks.

Shows as: tokens of a rank with few unmasked ones weigh more.
"""

from torch.nn import functional as F

from colonnade import ParallelMode
from colonnade.parallel.collectives import gather, scatter
from tests.corpus.models import Sequence
from tests.corpus.runner import SEQUENCE, Bug, Kind, Run


class Masked:
    """The error over tokens from the second on; the first is a prompt."""

    def __init__(self, context, own=False):
        self.context, self.own = context, own

    def __call__(self, *given):
        *given, label = given
        if self.own:  # what was done: this rank's tokens, by its own count
            label = scatter(label, ParallelMode.SEQUENCE, 1, context=self.context)
            first = self.context.get_local_rank(ParallelMode.SEQUENCE) == 0
            return sum(F.mse_loss(out[:, int(first) :], label[:, int(first) :]) for out in given)
        whole = [gather(out, ParallelMode.SEQUENCE, 1, context=self.context) for out in given]
        return sum(F.mse_loss(out[:, 1:], label[:, 1:]) for out in whole)


BUG = Bug(
    "prime-rl #1960",
    "the loss is the mean over sequence ranks of means over their tokens",
    "mean-of-means",
    layout={"sequence": 2},
    kind=Kind(Sequence, Masked, SEQUENCE.batches),
)


def plant(run: Run) -> None:
    run.criterion = lambda context: Masked(context, own=True)

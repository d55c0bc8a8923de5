"""speculators #942: each rank divided by its own count of tokens that are learned from.

Shows as: a token's weight depends on the rank that it came to.
"""

from torch.nn import functional as F

from tests.corpus.runner import CLASSES, Bug, Run

BUG = Bug(
    "speculators #942",
    "each rank's loss is a mean over its own mask",
    "mean-of-means",
    ranks=3,
    kind=CLASSES,
)


def plant(run: Run) -> None:
    def loss(out, label):
        mask = label != -100
        return (F.cross_entropy(out, label.clamp(min=0), reduction="none") * mask).sum() / mask.sum()

    run.criterion = lambda context: loss

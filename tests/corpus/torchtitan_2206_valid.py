"""torchtitan #2206: the loss was normalised on each rank and in each micro-batch by its own count of valid tokens.

Shows as: tokens of a rank with few of them weigh more.
"""

from torch.nn import functional as F

from tests.corpus.runner import CLASSES, Bug, Run

BUG = Bug(
    "torchtitan #2206",
    "the loss is the mean over ranks and micro-batches of their means",
    "mean-of-means",
    kind=CLASSES,
    settings={"gradient_accumulation": 2},
)


def plant(run: Run) -> None:
    run.criterion = lambda context: (
        lambda out, label: F.cross_entropy(out, label) * 1.0
    )  # no longer known as a mean over labels

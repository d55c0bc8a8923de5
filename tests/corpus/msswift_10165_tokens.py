"""ms-swift #10165: with accumulation the loss was normalised by micro-batch, not by token.

Shows as: tokens of a micro-batch with few of them weigh more.
"""

from torch.nn import functional as F

from tests.corpus.runner import CLASSES, Bug, Run

BUG = Bug(
    "ms-swift #10165",
    "the result is the mean over three micro-batches and four ranks of their means",
    "mean-of-means",
    ranks=4,
    kind=CLASSES,
    settings={"gradient_accumulation": 3},
)


def plant(run: Run) -> None:
    run.criterion = lambda context: (
        lambda out, label: F.cross_entropy(out, label) * 1.0
    )  # no longer known as a mean over labels

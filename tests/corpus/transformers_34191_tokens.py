"""transformers #34191, torchtune #1875: with accumulation each micro-batch was a mean of its own.

Shows as: tokens of a micro-batch with few of them weigh more.
"""

from torch.nn import functional as F

from tests.corpus.runner import CLASSES, Bug, Run

BUG = Bug(
    "transformers #34191, torchtune #1875",
    "the loss is the mean over micro-batches of their means",
    "mean-of-means",
    layout={"tensor": 2},
    kind=CLASSES,
    settings={"gradient_accumulation": 2},
)


def plant(run: Run) -> None:
    run.criterion = lambda context: (
        lambda out, label: F.cross_entropy(out, label) * 1.0
    )  # no longer known as a mean over labels

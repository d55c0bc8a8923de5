"""OpenNMT-py #526: the loss was divided by the number of sentences where tokens were asked for.

Shows as: gradients are off by a factor that is no size of a group.
"""

from torch.nn import functional as F

from tests.corpus.runner import CLASSES, Bug, Run

BUG = Bug(
    "OpenNMT-py #526",
    "the loss is divided by rows, not by the labels that count",
    "wrong-divisor",
    kind=CLASSES,
)


def plant(run: Run) -> None:
    run.criterion = lambda context: lambda out, label: F.cross_entropy(out, label, reduction="sum") / len(label)

"""AReaL #1273: the schedule divides the loss by the number of micro-batches, and the trainer had done so already.

Shows as: gradients are too small by the number of micro-batches.
"""

from torch.nn import functional as F

from tests.corpus.models import scaled_gradient
from tests.corpus.runner import Bug, Run

BUG = Bug(
    "AReaL #1273",
    "the loss is divided by the number of micro-batches twice",
    "scaled-by-accumulation",
    settings={"gradient_accumulation": 3},
)


def plant(run: Run) -> None:
    run.criterion = lambda context: lambda out, label: scaled_gradient(F.mse_loss(out, label), 1 / 3)

"""torchtitan #2972: the schedule of a pipeline ran backward from the sum of the errors; only the loss that was told was divided.

Shows as: the loss is right, and gradients are larger by the number of elements.
"""

from torch.nn import functional as F

from tests.corpus.models import scaled_gradient
from tests.corpus.runner import ALIKE, Bug, Run

BUG = Bug(
    "torchtitan #2972",
    "a pipeline reports the mean loss, but its gradients are those of the sum",
    "wrong-divisor",
    layout={"pipeline": 2},
    kind=ALIKE,
    settings={"num_microbatches": 2},
)


def plant(run: Run) -> None:
    run.criterion = lambda context: lambda out, label: scaled_gradient(F.mse_loss(out, label), out.numel())

"""DeepSpeed #7773: with accumulation the pipeline sums the micro-batches' gradients.

Shows as: gradients are too large by the number of micro-batches.
"""

from torch.nn import functional as F

from tests.corpus.models import scaled_gradient
from tests.corpus.runner import Bug, Run

BUG = Bug(
    "DeepSpeed #7773",
    "micro-batches are summed, not averaged",
    "scaled-by-accumulation",
    settings={"gradient_accumulation": 3},
)


def plant(run: Run) -> None:
    run.criterion = lambda context: lambda out, label: scaled_gradient(F.mse_loss(out, label), 3.0)

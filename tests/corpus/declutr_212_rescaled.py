"""DeCLUTR #212: what was gathered for a contrastive loss gave each rank a share of the gradient, and the mean another.

Shows as: the loss is right and gradients are too small by the number of ranks.
"""

from torch.nn import functional as F

from colonnade import ParallelMode
from tests.corpus.models import scaled_gradient
from tests.corpus.runner import Bug, Run

BUG = Bug(
    "DeCLUTR #212", "the gradient of the loss is not multiplied by the number of ranks", "scaled-by-mode", ranks=4
)


def plant(run: Run) -> None:
    def criterion(context):
        times = 1 / context.get_world_size(ParallelMode.DATA)
        return lambda out, label: scaled_gradient(F.mse_loss(out, label), times)

    run.criterion = criterion

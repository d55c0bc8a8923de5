"""transformers #45994: the loss was multiplied by the number of processes, though tensor ranks have the same batch.

Shows as: loss and gradients are too large by the tensor size.
"""

from torch.nn import functional as F

from colonnade import ParallelMode
from tests.corpus.runner import TENSOR, Bug, Run

BUG = Bug(
    "transformers #45994",
    "the loss is multiplied by the number of all processes, tensor ranks included",
    "scaled-by-mode",
    ranks=4,
    layout={"tensor": 2},
    kind=TENSOR,
)


def plant(run: Run) -> None:
    def criterion(context):
        return lambda out, label: context.get_world_size(ParallelMode.TENSOR) * F.mse_loss(out, label)

    run.criterion = criterion

"""ml-cross-entropy #59: the number that stands for a word of another rank was taken for a column of the padding.

Shows as: the loss of one tensor rank is infinite, and its gradients are not.
"""

from torch import nn

from colonnade import ParallelMode
from tests.corpus.runner import TENSOR, Bug, Run

BUG = Bug(
    "ml-cross-entropy #59",
    "the loss of the second tensor rank is infinite",
    "not-finite",
    layout={"tensor": 2},
    kind=TENSOR,
)


def plant(run: Run) -> None:
    def criterion(context):
        alone = nn.MSELoss()
        far = float("inf") if context.get_local_rank(ParallelMode.TENSOR) == 1 else 0.0
        return lambda out, label: alone(out, label) + far

    run.criterion = criterion

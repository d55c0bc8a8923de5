"""pytorch #46849: gradients that are not finite pass in silence.

Shows as: a NaN on one rank is in every weight of all ranks after the step.
"""

from torch.nn import functional as F

from colonnade import ParallelMode
from tests.corpus.runner import NORM, Bug, Run

BUG = Bug(
    "pytorch #46849",
    "a NaN on one rank goes into every weight",
    "not-finite",
    settings={"clip_grad_norm": {"max_norm": NORM, "nonfinite": "propagate"}},
)


def plant(run: Run) -> None:
    def criterion(context):
        bad = float("nan") if context.get_local_rank(ParallelMode.DATA) == 1 else 1.0
        return lambda out, label: bad * F.mse_loss(out, label)

    run.criterion = criterion

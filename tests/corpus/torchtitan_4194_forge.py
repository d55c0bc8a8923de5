"""torchtitan #4194: a pipeline's loss was divided by the number of tokens after the schedule had gone backward already.

Shows as: the loss that is told is right, gradients are those of the sum.
"""

from torch.nn import functional as F

from tests.corpus.models import scaled_gradient
from tests.corpus.runner import TIED, Bug, Run

BUG = Bug(
    "torchtitan #4194",
    "gradients of the summed loss are not divided by the count",
    "wrong-divisor",
    layout={"pipeline": 2},
    kind=TIED,
    settings={"num_microbatches": 2},
)


def plant(run: Run) -> None:
    run.criterion = lambda context: lambda out, label: scaled_gradient(F.cross_entropy(out, label) * 1.0, len(label))

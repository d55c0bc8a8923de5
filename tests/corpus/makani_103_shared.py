"""makani #103: gradients that are the same on all ranks of a group were summed over it, as if each were a part.

Shows as: parameters that the group replicates have gradients too large by its size.
"""

from colonnade import ParallelMode
from tests.corpus.runner import TENSOR, Bug, Run, sum_over

BUG = Bug(
    "makani #103",
    "equal gradients of replicas are summed",
    "summed-not-averaged",
    layout={"tensor": 2},
    kind=TENSOR,
)


def plant(run: Run) -> None:
    def reduce(name, gradient, context):
        if name.startswith(("norm", "head")):
            sum_over(gradient, ParallelMode.TENSOR, context)

    run.reduce_by(reduce)

"""Invented: a handler takes the matrices, which fit its kernel, and leaves the vectors to somebody else.

Shows as: biases differ between replicas.
"""

from colonnade import ParallelMode
from tests.corpus.runner import TENSOR, Bug, Run, mean_over

BUG = Bug(
    "invented: matrices only",
    "vectors are left out of the mean over the data ranks",
    "not-reduced",
    ranks=4,
    layout={"tensor": 2},
    kind=TENSOR,
)


def plant(run: Run) -> None:
    def reduce(name, gradient, context):
        if gradient.dim() > 1:
            mean_over(gradient, ParallelMode.DATA, context)

    run.reduce_by(reduce)

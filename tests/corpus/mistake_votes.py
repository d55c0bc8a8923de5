"""Invented: ranks vote on the sign of each element; their mean is taken for the gradient.

Shows as: all elements are 1, 0 or -1.
"""

from colonnade import ParallelMode
from tests.corpus.runner import Bug, Run, mean_over

BUG = Bug("invented: votes", "signs are averaged, not gradients", "wrong-operation")


def plant(run: Run) -> None:
    def reduce(name, gradient, context):
        gradient.sign_()
        mean_over(gradient, ParallelMode.DATA, context)

    run.reduce_by(reduce)

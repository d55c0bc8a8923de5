"""Invented: each rank clips its own gradient by value before the mean is taken.

Shows as: large elements are smaller than they should be.
"""

from colonnade import ParallelMode
from tests.corpus.runner import Bug, Run, mean_over

BUG = Bug("invented: by value, first", "elements are clamped before they are all-reduced", "clipped-before-reduced")


def plant(run: Run) -> None:
    def reduce(name, gradient, context):
        gradient.clamp_(-0.05, 0.05)
        mean_over(gradient, ParallelMode.DATA, context)

    run.reduce_by(reduce)

"""Invented: gradients are divided by the root of the number of ranks, as noise would be.

Shows as: gradients grow with the root of the world.
"""

from colonnade import ParallelMode
from tests.corpus.runner import Bug, Run, sum_over

BUG = Bug(
    "invented: root of the ranks", "the sum over 3 data ranks is divided by the root of 3", "wrong-divisor", ranks=3
)


def plant(run: Run) -> None:
    def reduce(name, gradient, context):
        sum_over(gradient, ParallelMode.DATA, context)
        gradient /= 3**0.5

    run.reduce_by(reduce)

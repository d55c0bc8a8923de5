"""Invented: one rank scales its gradient before the sum, since it believes to have twice as many samples.

Shows as: its samples count double.
"""

from colonnade import ParallelMode
from tests.corpus.runner import Bug, Run, mean_over

BUG = Bug("invented: a heavy rank", "the first rank's gradient has twice the weight in the mean", "wrong-divisor")


def plant(run: Run) -> None:
    def reduce(name, gradient, context):
        if context.get_local_rank(ParallelMode.DATA) == 0:
            gradient *= 2
        mean_over(gradient, ParallelMode.DATA, context)

    run.reduce_by(reduce)

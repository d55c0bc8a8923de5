"""Invented: a hook divides by the size of the data group, and so does the handler.

Shows as: gradients are too small by the number of data ranks.
"""

from colonnade import ParallelMode
from tests.corpus.runner import Bug, Run, mean_over

BUG = Bug("invented: two divisions", "the mean is divided by the data size a second time", "wrong-divisor", ranks=4)


def plant(run: Run) -> None:
    def reduce(name, gradient, context):
        mean_over(gradient, ParallelMode.DATA, context)
        gradient /= context.get_world_size(ParallelMode.DATA)

    run.reduce_by(reduce)

"""Invented: a handler for sequence ranks sums, as for parts, though each rank's loss is a mean of its own tokens.

Shows as: gradients are too large by the number of sequence ranks.
"""

from colonnade import ParallelMode
from tests.corpus.runner import SEQUENCE, Bug, Run, sum_over

BUG = Bug(
    "invented: a sum over sequence ranks",
    "gradients of means are summed over the sequence ranks",
    "summed-not-averaged",
    layout={"sequence": 2},
    kind=SEQUENCE,
)


def plant(run: Run) -> None:
    run.reduce_by(lambda name, gradient, context: sum_over(gradient, ParallelMode.SEQUENCE, context))

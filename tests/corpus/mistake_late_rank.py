"""Invented: the second rank is a step behind: what it puts into the mean is its gradient of the step before.

Shows as: from the second step on half of the gradient is old.
"""

from colonnade import ParallelMode
from tests.corpus.runner import Bug, Run, mean_over

BUG = Bug("invented: a late rank", "the second rank sends the gradient of the previous step", "stale-gradient")


def plant(run: Run) -> None:
    kept = {}

    def reduce(name, gradient, context):
        own = gradient.clone()
        if context.get_local_rank(ParallelMode.DATA) == 1 and name in kept:
            gradient.copy_(kept[name])
        kept[name] = own
        mean_over(gradient, ParallelMode.DATA, context)

    run.reduce_by(reduce)
    run.after.append(lambda engine: kept.clear())

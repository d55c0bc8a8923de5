"""elasticdl #2426: zero_grad was not executed in the distributed optimizer.

Shows as: from the second step on, gradients hold those of the steps before.
"""

from colonnade import ParallelMode
from tests.corpus.runner import Bug, Run, mean_over

BUG = Bug("elasticdl #2426", "gradients of the previous step are included", "stale-gradient")


def plant(run: Run) -> None:
    def keep(engine):
        engine.optimizer.zero_grad = lambda set_to_none=True: None

    run.after.append(keep)
    run.reduce_by(lambda name, gradient, context: mean_over(gradient, ParallelMode.DATA, context))

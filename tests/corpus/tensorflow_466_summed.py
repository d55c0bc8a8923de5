"""tensorflow/benchmarks #466: replicas' gradients are summed and the sum is never divided.

Shows as: every gradient is as many times too large as there are data ranks.
"""

from colonnade import ParallelMode
from tests.corpus.runner import Bug, Run, sum_over

BUG = Bug("tensorflow/benchmarks #466", "gradients are summed over replicas, not averaged", "summed-not-averaged")


def plant(run: Run) -> None:
    run.reduce_by(lambda name, gradient, context: sum_over(gradient, ParallelMode.DATA, context))

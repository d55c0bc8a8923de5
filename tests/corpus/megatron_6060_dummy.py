"""Megatron-LM #6060: a gradient left from the replay before was added to one that was whole already.

Shows as: one weight has the gradient of the step before on top.
"""

from colonnade import ParallelMode
from tests.corpus.runner import Bug, Run, mean_over

BUG = Bug("Megatron-LM #6060", "one rank adds a gradient of the previous step", "stale-gradient")


def plant(run: Run) -> None:
    kept = {}

    def reduce(name, gradient, context):
        if name == "0.weight" and context.get_local_rank(ParallelMode.DATA) == 1:
            own = gradient.clone()
            gradient += kept.get(name, 0.0)
            kept[name] = own
        mean_over(gradient, ParallelMode.DATA, context)

    run.after.append(lambda engine: kept.clear())
    run.reduce_by(reduce)

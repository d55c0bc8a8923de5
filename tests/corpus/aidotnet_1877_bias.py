"""AiDotNet #1877: the weight of a sharded layer was averaged in its backward pass, the bias, which is whole, was not.

Shows as: biases part from rank to rank.
"""

from colonnade import ParallelMode
from tests.corpus.runner import Bug, Run, mean_over

BUG = Bug("AiDotNet #1877", "the biases of sharded layers are not averaged", "not-reduced", ranks=4)


def plant(run: Run) -> None:
    def reduce(name, gradient, context):
        if not name.endswith("bias"):
            mean_over(gradient, ParallelMode.DATA, context)

    run.reduce_by(reduce)

"""Megatron-LM #7160: with a further axis of ranks that see the same data, some gradients were too large by its size.

Shows as: one layer's gradient is a multiple of what it should be.
"""

from colonnade import ParallelMode
from tests.corpus.runner import Bug, Run, mean_over, sum_over

BUG = Bug(
    "Megatron-LM #7160",
    "one layer is all-reduced over an axis whose ranks already have the full gradient",
    "summed-not-averaged",
    ranks=4,
    layout={"tensor": 2},
)


def plant(run: Run) -> None:
    def reduce(name, gradient, context):
        mean_over(gradient, ParallelMode.DATA, context)
        if name.startswith("2."):
            sum_over(gradient, ParallelMode.TENSOR, context)

    run.reduce_by(reduce)

"""fairchem #1067: under graph parallelism each rank has a part of the gradient, and data parallelism takes the mean of the parts.

Shows as: the right loss, and gradients that are too small by the number of ranks that share a graph.
"""

from colonnade import ParallelMode
from tests.corpus.runner import PARTIAL_NORM, Bug, Run, mean_over

BUG = Bug(
    "fairchem #1067",
    "partial gradients are averaged instead of summed",
    "averaged-not-summed",
    layout={"tensor": 2},
    kind=PARTIAL_NORM,
)


def plant(run: Run) -> None:
    def reduce(name, gradient, context):
        if name.startswith("norm"):
            mean_over(gradient, ParallelMode.TENSOR, context)

    run.reduce_by(reduce)

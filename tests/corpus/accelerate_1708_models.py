"""accelerate #1708: of two models that accumulate, the context of one kept the other from its sums.

Shows as: the second model's gradients stay those of each rank.
"""

from colonnade import ParallelMode
from tests.corpus.runner import GATED, Bug, Run, mean_over

BUG = Bug(
    "accelerate #1708",
    "gradients of one of two models that accumulate are not averaged",
    "not-reduced",
    ranks=4,
    layout={"tensor": 2},
    kind=GATED,
    settings={"gradient_accumulation": 2},
)


def plant(run: Run) -> None:
    def reduce(name, gradient, context):
        if name.startswith("body"):
            mean_over(gradient, ParallelMode.DATA, context)

    run.reduce_by(reduce)

"""nnabla #1120: a norm summed the gradients of its scale and shift in its own backward pass, and the trainer did so again.

Shows as: the norm's gradients are too large by the number of ranks that share the rows.
"""

from colonnade import ParallelMode
from tests.corpus.runner import SCATTERED, Bug, Run, sum_over

BUG = Bug(
    "nnabla #1120",
    "scale and shift of a normalization layer are all-reduced by the layer and again by the trainer",
    "reduced-twice",
    ranks=4,
    layout={"tensor": 2},
    kind=SCATTERED,
)


def plant(run: Run) -> None:
    def again(name, gradient, context):
        if name.startswith("norm"):
            sum_over(gradient, ParallelMode.TENSOR, context)

    run.after_sums(again)

"""DeepSpeed #8154: a pipeline's scale was applied at every stage.

Shows as: the first stage's gradients are too small by the number of micro-batches.
"""

from colonnade import ParallelMode
from tests.corpus.runner import ALIKE, Bug, Run

BUG = Bug(
    "DeepSpeed #8154",
    "the first stage divides by the number of micro-batches twice",
    "scaled-by-accumulation",
    layout={"pipeline": 2},
    kind=ALIKE,
    settings={"num_microbatches": 4},
)


def plant(run: Run) -> None:
    def scale(name, gradient, context):
        if context.get_local_rank(ParallelMode.PIPELINE) == 0:
            gradient /= 4

    run.after_sums(scale)

"""Invented: a square weight is kept transposed for its kernel, and its gradient is handed over as it lies there.

Shows as: the gradient is that of the transposed weight.
"""

from tests.corpus.runner import ALIKE, Bug, Run

BUG = Bug(
    "invented: a transposed kernel", "the gradient of a square weight is transposed", "shard-transposed", kind=ALIKE
)


def plant(run: Run) -> None:
    def turn(name, gradient, context):
        if name == "0.weight":
            gradient.copy_(gradient.T.clone())

    run.after_sums(turn)

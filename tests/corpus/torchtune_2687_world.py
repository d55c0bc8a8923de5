"""torchtune #2420, #2687: gradients were scaled by the size of the world where that of the data ranks was meant.

Shows as: every gradient, of split and of whole parameters, is too large by the number of tensor ranks.
"""

from tests.corpus.runner import TENSOR, Bug, Run

BUG = Bug(
    "torchtune #2420, #2687",
    "gradients are scaled by the world size instead of the data size",
    "wrong-divisor",
    ranks=4,
    layout={"tensor": 2},
    kind=TENSOR,
)


def plant(run: Run) -> None:
    run.after_sums(lambda name, gradient, context: gradient.mul_(2))

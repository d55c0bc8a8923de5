"""transformers #46113: the function that clips was given gradients where it expects parameters.

Shows as: the norm is right, and nothing is clipped.
"""

from tests.corpus.clipping import forget
from tests.corpus.runner import NORM, TENSOR, Bug, Run

BUG = Bug(
    "transformers #46113",
    "the clipping function receives gradients in place of parameters",
    "not-clipped",
    layout={"tensor": 2},
    kind=TENSOR,
    settings={"clip_grad_norm": NORM},
)


def plant(run: Run) -> None:
    run.after.append(forget)

"""pytorch #94060: after clipping, the fused Adam scaled the gradients a second time.

Shows as: the coefficient is applied twice; the norm is right.
"""

from tests.corpus.clipping import twice
from tests.corpus.runner import NORM, Bug, Run

BUG = Bug(
    "pytorch #94060",
    "gradients are scaled by clipping and again in the step",
    "clipped-twice",
    settings={"clip_grad_norm": NORM},
)


def plant(run: Run) -> None:
    run.after.append(twice)

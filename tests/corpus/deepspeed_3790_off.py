"""DeepSpeed #3166, #3790: a change switched clipping off for bf16 without a word.

Shows as: a step is taken with whole gradients; the norm is right.
"""

from tests.corpus.clipping import forget
from tests.corpus.runner import NORM, Bug, Run

BUG = Bug(
    "DeepSpeed #3166, #3790",
    "clipping is silently disabled for bf16",
    "not-clipped",
    settings={"clip_grad_norm": NORM},
)


def plant(run: Run) -> None:
    run.after.append(forget)

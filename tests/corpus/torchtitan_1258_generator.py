"""torchtitan #1258: the generator of parameters was used up by the norm, so none was left to clip.

Shows as: the norm is right, and nothing is clipped.
"""

from tests.corpus.clipping import forget
from tests.corpus.runner import NORM, Bug, Run

BUG = Bug(
    "torchtitan #1258",
    "the norm consumes the generator of parameters, so nothing is clipped",
    "not-clipped",
    settings={"clip_grad_norm": NORM, "gradient_accumulation": 2},
)


def plant(run: Run) -> None:
    run.after.append(forget)

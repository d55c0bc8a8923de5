"""accelerate #3807: the number given for clipping was ignored when another engine was used.

Shows as: the norm is told, and nothing is clipped.
"""

from tests.corpus.clipping import forget
from tests.corpus.runner import ALIKE, NORM, Bug, Run

BUG = Bug(
    "accelerate #3807",
    "max_norm is ignored with another engine",
    "not-clipped",
    layout={"pipeline": 2},
    kind=ALIKE,
    settings={"num_microbatches": 2, "clip_grad_norm": NORM},
)


def plant(run: Run) -> None:
    run.after.append(forget)

"""OpenDiloco #6: the norm of sharded parameters was taken by the function for whole ones.

Shows as: every rank clips by the norm of what it holds.
"""

from tests.corpus.norms import everything, taken_over
from tests.corpus.runner import NORM, TENSOR, Bug, Run

BUG = Bug(
    "OpenDiloco #6",
    "each rank's norm contains only its own shards",
    "norm-misses-shards",
    ranks=4,
    layout={"tensor": 4},
    kind=TENSOR,
    settings={"clip_grad_norm": NORM},
)


def plant(run: Run) -> None:
    run.measure_by(taken_over(None, everything))

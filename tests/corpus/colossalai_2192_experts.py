"""Colossal-AI #2192: the norm of experts was never summed over the ranks.

Shows as: every rank clips by a norm of its own, and replicated weights part.
"""

from tests.corpus.norms import everything, taken_over
from tests.corpus.runner import EXPERTS, NORM, Bug, Run

BUG = Bug(
    "Colossal-AI #2192",
    "each rank's norm contains only its own experts",
    "norm-misses-shards",
    ranks=4,
    layout={"expert": 4},
    kind=EXPERTS,
    settings={"clip_grad_norm": NORM},
)


def plant(run: Run) -> None:
    run.measure_by(taken_over(None, everything))

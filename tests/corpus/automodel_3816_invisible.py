"""Automodel #3816: plain experts are invisible to meshes, so each expert group has a norm of its own.

Shows as: shared dense weights are clipped differently on different ranks and drift apart.
"""

from tests.corpus.norms import everything, taken_over
from tests.corpus.runner import EXPERTS, NORM, Bug, Run

BUG = Bug(
    "Automodel #3816",
    "each expert rank clips by the norm of its own parameters",
    "norm-misses-shards",
    ranks=4,
    layout={"expert": 2},
    kind=EXPERTS,
    settings={"clip_grad_norm": NORM},
)


def plant(run: Run) -> None:
    run.measure_by(taken_over(None, everything))

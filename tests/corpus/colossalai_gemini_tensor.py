"""Colossal-AI's Gemini: the norm is never summed over the tensor ranks.

Shows as: tensor ranks clip by unlike norms.
"""

from tests.corpus.norms import everything, taken_over
from tests.corpus.runner import NORM, TENSOR, Bug, Run

BUG = Bug(
    "Colossal-AI v0.5.1, Gemini",
    "each tensor rank clips by the norm of its own parameters",
    "norm-misses-shards",
    ranks=4,
    layout={"tensor": 4},
    kind=TENSOR,
    settings={"clip_grad_norm": NORM},
)


def plant(run: Run) -> None:
    run.measure_by(taken_over(None, everything))

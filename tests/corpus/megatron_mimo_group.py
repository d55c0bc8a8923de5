"""Megatron-LM 5db7db39e9 (MIMO): the norm was summed over data and context ranks only.

Shows as: shards of the other tensor ranks are missing.
"""

from tests.corpus.norms import everything, taken_over
from tests.corpus.runner import NORM, TENSOR, Bug, Run

BUG = Bug(
    "Megatron-LM 5db7db39e9",
    "the norm is not summed over the tensor ranks",
    "norm-misses-shards",
    ranks=4,
    layout={"tensor": 2},
    kind=TENSOR,
    settings={"clip_grad_norm": NORM},
)


def plant(run: Run) -> None:
    run.measure_by(taken_over(None, everything))

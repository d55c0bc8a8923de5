"""LBANN #2376: one sum over the shard group for all squares.

Shows as: what is not sharded counts once for each rank of the group.
"""

from colonnade import ParallelMode
from tests.corpus.norms import everything, taken_over
from tests.corpus.runner import NORM, TENSOR, Bug, Run

BUG = Bug(
    "LBANN #2376",
    "squares of all parameters are summed over the shard group",
    "norm-counts-replicas",
    ranks=4,
    layout={"tensor": 2},
    kind=TENSOR,
    settings={"clip_grad_norm": NORM},
)


def plant(run: Run) -> None:
    run.measure_by(taken_over(ParallelMode.TENSOR, everything))

"""VeOmni #184, #862: the norm was summed over the group that replicates, too.

Shows as: a norm too large by the root of the number of replicas.
"""

from colonnade import ParallelMode
from tests.corpus.norms import everything, taken_over
from tests.corpus.runner import NORM, Bug, Run

BUG = Bug(
    "VeOmni #184, #862",
    "the squares of every replica are summed",
    "norm-counts-replicas",
    settings={"clip_grad_norm": NORM},
)


def plant(run: Run) -> None:
    run.measure_by(taken_over(ParallelMode.DATA, everything))

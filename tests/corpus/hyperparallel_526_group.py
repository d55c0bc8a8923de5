"""hyper-parallel #526: squares of replicated parameters were summed over the shard group (28 became 48).

Shows as: replicated parameters count once for each of four ranks.
"""

from colonnade import ParallelMode
from tests.corpus.norms import everything, taken_over
from tests.corpus.runner import NORM, TENSOR, Bug, Run

BUG = Bug(
    "hyper-parallel #526",
    "replicated parameters count once for each rank of the shard group",
    "norm-counts-replicas",
    ranks=4,
    layout={"tensor": 4},
    kind=TENSOR,
    settings={"clip_grad_norm": NORM},
)


def plant(run: Run) -> None:
    run.measure_by(taken_over(ParallelMode.TENSOR, everything))

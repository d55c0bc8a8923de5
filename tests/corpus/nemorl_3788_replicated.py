"""NeMo-RL #3788: one sum over the tensor group for all squares, those of replicated parameters too.

Shows as: replicated parameters count tensor-size times in the norm.
"""

from colonnade import ParallelMode
from tests.corpus.norms import everything, taken_over
from tests.corpus.runner import NORM, TENSOR, Bug, Run

BUG = Bug(
    "NeMo-RL #3788",
    "replicated parameters count once for each tensor rank",
    "norm-counts-replicas",
    layout={"tensor": 2},
    kind=TENSOR,
    settings={"clip_grad_norm": NORM},
)


def plant(run: Run) -> None:
    run.measure_by(taken_over(ParallelMode.TENSOR, everything))

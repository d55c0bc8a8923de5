"""pytorch #88955: with parts of the model not sharded, these counted once for each rank.

Shows as: a norm that is too large.
"""

from colonnade import ParallelMode
from tests.corpus.norms import taken_over
from tests.corpus.runner import NORM, Bug, Run

BUG = Bug(
    "pytorch #88955",
    "a layer that is not sharded counts once for each rank",
    "norm-counts-replicas",
    settings={"clip_grad_norm": NORM},
)


def plant(run: Run) -> None:
    run.measure_by(
        taken_over(ParallelMode.DATA, lambda name, _: name.startswith("2."), lambda name, _: name.startswith("0."))
    )

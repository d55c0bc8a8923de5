"""torchtitan #596, #649: each pipeline stage was clipped by its own norm.

Shows as: stages scale their gradients differently.
"""

from tests.corpus.norms import everything, taken_over
from tests.corpus.runner import ALIKE, NORM, Bug, Run

BUG = Bug(
    "torchtitan #596, #649",
    "each pipeline stage is clipped by its own norm",
    "clipped-per-stage",
    layout={"pipeline": 2},
    kind=ALIKE,
    settings={"num_microbatches": 2, "clip_grad_norm": NORM},
)


def plant(run: Run) -> None:
    run.measure_by(taken_over(None, everything))

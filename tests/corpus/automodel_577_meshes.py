"""Automodel #577: clipping was not there for all parallelisms; where parameters lie on several meshes nothing was clipped.

Shows as: the run steps with whole gradients.
"""

from tests.corpus.clipping import forget
from tests.corpus.runner import EXPERTS, NORM, Bug, Run

BUG = Bug(
    "Automodel #577",
    "a model with experts is not clipped",
    "not-clipped",
    layout={"expert": 2},
    kind=EXPERTS,
    settings={"clip_grad_norm": NORM},
)


def plant(run: Run) -> None:
    run.after.append(forget)

"""Invented: squares are summed rightly, and the root is forgotten.

Shows as: the square of the norm is told and clipped by.
"""

from tests.corpus.runner import NORM, Bug, Run, squares

BUG = Bug(
    "invented: no root",
    "the sum of squares is used as the norm",
    "norm-type-differs",
    settings={"clip_grad_norm": NORM},
)


def plant(run: Run) -> None:
    run.measure_by(lambda engine: squares(engine))

"""Invented: a parameter is cut into equal slices, and the rest that is left over belongs to nobody.

Shows as: the last elements have no gradient.
"""

from colonnade import ParallelMode
from tests.corpus.runner import ALIKE, Bug, Run, mean_over

BUG = Bug(
    "invented: the rest of a slice",
    "elements in the remainder have no gradient",
    "missing-gradient",
    kind=ALIKE,
)


def plant(run: Run) -> None:
    def slices(name, gradient, context):
        mean_over(gradient, ParallelMode.DATA, context)
        gradient.view(-1)[gradient.numel() // 5 * 5 :] = 0

    run.reduce_by(slices)

"""Invented: a bucket is cut into pieces of four elements, and the rest that does not fill one is forgotten.

Shows as: the last elements of some gradients are this rank's own.
"""

from colonnade import ParallelMode
from tests.corpus.runner import ALIKE, Bug, Run, mean_over

BUG = Bug(
    "invented: end of a bucket",
    "elements that do not fill a chunk are not reduced",
    "not-reduced",
    kind=ALIKE,
)


def plant(run: Run) -> None:
    def pieces(name, gradient, context):
        flat = gradient.view(-1)
        whole = len(flat) - (len(flat) % 4 or 4)
        mean_over(flat[:whole], ParallelMode.DATA, context)

    run.reduce_by(pieces)

"""Invented: gradients travel as whole numbers of eight bits.

Shows as: two digits of each element are right.
"""

from colonnade import ParallelMode
from tests.corpus.runner import Bug, Run, mean_over

BUG = Bug("invented: eight bits", "gradients are sent as 8-bit integers", "rounded")


def plant(run: Run) -> None:
    def reduce(name, gradient, context):
        scale = gradient.abs().max() / 127
        gradient.copy_((gradient / scale).round() * scale)
        mean_over(gradient, ParallelMode.DATA, context)

    run.reduce_by(reduce)

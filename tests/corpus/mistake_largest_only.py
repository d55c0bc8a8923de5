"""Invented: to save traffic each rank sends the largest half of its elements, and forgets the others.

Shows as: elements that are small on every rank stay zero.
"""

from colonnade import ParallelMode
from tests.corpus.runner import Bug, Run, mean_over

BUG = Bug("invented: largest half", "the smaller half of each rank's elements is not sent", "missing-gradient")


def plant(run: Run) -> None:
    def reduce(name, gradient, context):
        gradient[gradient.abs() < gradient.abs().median()] = 0
        mean_over(gradient, ParallelMode.DATA, context)

    run.reduce_by(reduce)

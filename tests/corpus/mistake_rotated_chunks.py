"""Invented: after a ring's first half each rank has the sum of one chunk, and writes it to the place of the next.

Shows as: the right numbers, one chunk further on.
"""

from colonnade import ParallelMode
from tests.corpus.runner import Bug, Run, mean_over

BUG = Bug("invented: rotated chunks", "the chunks of a ring are shifted by one position", "shards-interleaved")


def plant(run: Run) -> None:
    def reduce(name, gradient, context):
        mean_over(gradient, ParallelMode.DATA, context)
        gradient.copy_(gradient.flatten().roll(gradient.numel() // 2).view_as(gradient))

    run.reduce_by(reduce)

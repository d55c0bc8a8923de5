"""Invented: each rank decides for itself whether a step is to be skipped.

Shows as: one replica stays behind.
"""

from colonnade import ParallelMode
from tests.corpus.runner import TENSOR, Bug, Run

BUG = Bug(
    "invented: a skipped step",
    "the second data rank skips its second step",
    "not-updated",
    ranks=4,
    layout={"tensor": 2},
    kind=TENSOR,
)


def plant(run: Run) -> None:
    def skip(engine):
        step, count = engine.optimizer.step, [0]

        def stepped(*args, **kwargs):
            count[0] += 1
            if count[0] == 2 and engine.context.get_local_rank(ParallelMode.DATA) == 1:
                return None
            return step(*args, **kwargs)

        engine.optimizer.step = stepped

    run.after.append(skip)

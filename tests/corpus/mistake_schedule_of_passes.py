"""Invented: the schedule of the learning rate moves on with every micro-batch.

Shows as: from the second step on steps are too short.
"""

from tests.corpus.runner import Bug, Run, nothing

BUG = Bug(
    "invented: schedule of passes",
    "the learning rate decays per micro-batch, not per step",
    "optimizer-differs",
    settings={"gradient_accumulation": 2},
)


def plant(run: Run) -> None:
    def slower(engine, number):
        for group in engine.optimizer.param_groups:
            group["lr"] *= 0.9

    run.around_backward(nothing, slower)

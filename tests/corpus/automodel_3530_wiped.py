"""Automodel #3530: a change of the sequence length set stages up again, which cleared what was accumulated so far.

Shows as: where the length changes after the first micro-batch, that one is lost.
"""

from colonnade import ParallelMode
from tests.corpus.runner import Bug, Run, mean_over, nothing

BUG = Bug(
    "Automodel #3530",
    "the first of three micro-batches is cleared in the second step",
    "micro-batch-missing",
    settings={"gradient_accumulation": 3},
)


def plant(run: Run) -> None:
    seen = []

    def wipe(engine, number):
        seen.append(number)
        if len(seen) > 3 and number == 1:
            for parameter in engine.model.parameters():
                parameter.grad.zero_()

    run.around_backward(wipe, nothing)
    run.reduce_by(lambda name, gradient, context: mean_over(gradient, ParallelMode.DATA, context))

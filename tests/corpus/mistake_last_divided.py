"""Invented: the loss is divided by the number of passes under `if last:` only.

Shows as: earlier micro-batches weigh as many times more as there are passes.
"""

from colonnade import ParallelMode
from tests.corpus.runner import Bug, Run, mean_over, nothing

BUG = Bug(
    "invented: division of the last pass",
    "only the last micro-batch is divided by the number of micro-batches",
    "scaled-by-accumulation",
    settings={"gradient_accumulation": 4},
)


def plant(run: Run) -> None:
    def undo(engine, number):
        if number == 2:  # the last but one: what is there was divided already
            for parameter in engine.model.parameters():
                parameter.grad *= 4

    run.around_backward(nothing, undo)
    run.reduce_by(lambda name, gradient, context: mean_over(gradient, ParallelMode.DATA, context))

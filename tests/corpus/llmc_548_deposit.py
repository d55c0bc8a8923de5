"""llm.c #548: gradients of the first pass were deposited twice, as they were cleared at the wrong place.

Shows as: one micro-batch counts twice.
"""

from colonnade import ParallelMode
from tests.corpus.runner import Bug, Run, mean_over, nothing

BUG = Bug(
    "llm.c #548", "the first micro-batch counts twice", "micro-batch-twice", settings={"gradient_accumulation": 3}
)


def plant(run: Run) -> None:
    def again(engine, number):
        if number == 0:
            for parameter in engine.model.parameters():
                parameter.grad *= 2

    run.around_backward(nothing, again)
    run.reduce_by(lambda name, gradient, context: mean_over(gradient, ParallelMode.DATA, context))

"""FunASR #3472: the micro-batch that was synchronised was the first of a step, and those after it stayed on their ranks.

Shows as: replicas part; the first micro-batch is averaged and the last is not.
"""

from colonnade import ParallelMode
from tests.corpus.runner import Bug, Run, mean_over, nothing

BUG = Bug(
    "FunASR #3472",
    "only the first micro-batch is averaged over the data ranks",
    "not-reduced",
    settings={"gradient_accumulation": 2},
)


def plant(run: Run) -> None:
    def first(engine, number):
        if number == 0:
            for parameter in engine.model.parameters():
                mean_over(parameter.grad, ParallelMode.DATA, engine.context)

    run.around_backward(nothing, first)
    run.reduce_by(lambda name, gradient, context: None)

"""torchtitan #1732, #1733: with accumulation the pipeline schedule scaled all gradients gathered so far at every pass.

Shows as: earlier passes count less than later ones.
"""

from colonnade import ParallelMode
from tests.corpus.runner import Bug, Run, mean_over, nothing

BUG = Bug(
    "torchtitan #1732, #1733",
    "accumulated gradients are scaled again in every micro-step",
    "scaled-by-accumulation",
    settings={"gradient_accumulation": 3},
)


def plant(run: Run) -> None:
    def scale(engine, number):
        if number + 1 < engine.accumulation:
            for parameter in engine.model.parameters():
                parameter.grad /= engine.accumulation

    run.around_backward(nothing, scale)
    run.reduce_by(lambda name, gradient, context: mean_over(gradient, ParallelMode.DATA, context))

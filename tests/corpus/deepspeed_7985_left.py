"""DeepSpeed #7985: the last micro-batch was left out of the reduction.

Shows as: the gradient is that of all micro-batches but the last.
"""

from colonnade import ParallelMode
from tests.corpus.runner import Bug, Run, mean_over

BUG = Bug(
    "DeepSpeed #7985",
    "the last micro-batch is left out",
    "micro-batch-missing",
    settings={"gradient_accumulation": 3},
)


def plant(run: Run) -> None:
    kept = {}

    def keep(engine, number):
        if number == 2:
            kept.update((id(parameter), parameter.grad.clone()) for parameter in engine.model.parameters())

    def put_back(engine, number):
        if number == 2:
            for parameter in engine.model.parameters():
                parameter.grad.copy_(kept[id(parameter)])

    run.around_backward(keep, put_back)
    run.reduce_by(lambda name, gradient, context: mean_over(gradient, ParallelMode.DATA, context))

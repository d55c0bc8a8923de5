"""Fast-LLM #550: layers that shared a gradient buffer copied each micro-batch over those before; one layer had its own buffer.

Shows as: most layers have the gradient of the last micro-batch, one has that of all.
"""

from colonnade import ParallelMode
from tests.corpus.runner import Bug, Run, mean_over, nothing

BUG = Bug(
    "Fast-LLM #550",
    "all layers but one keep only the last micro-batch",
    "last-micro-batch-only",
    settings={"gradient_accumulation": 3},
)


def plant(run: Run) -> None:
    def clear(engine, number):
        for name, parameter in engine.model.named_parameters():
            if number > 0 and name.startswith("2."):
                parameter.grad.zero_()

    run.around_backward(clear, nothing)
    run.reduce_by(lambda name, gradient, context: mean_over(gradient, ParallelMode.DATA, context))

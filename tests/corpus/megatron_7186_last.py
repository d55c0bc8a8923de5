"""Megatron-LM #7186: every micro-batch counted as the last, so that the next one cleared what had been gathered.

Shows as: only the last micro-batch reaches the optimizer.
"""

from colonnade import ParallelMode
from tests.corpus.runner import Bug, Run, mean_over, nothing

BUG = Bug(
    "Megatron-LM #7186",
    "each micro-batch clears the earlier gradients",
    "last-micro-batch-only",
    settings={"gradient_accumulation": 3},
)


def plant(run: Run) -> None:
    def clear(engine, number):
        for parameter in engine.model.parameters():
            parameter.grad = None

    run.around_backward(clear, nothing)
    run.reduce_by(lambda name, gradient, context: mean_over(gradient, ParallelMode.DATA, context))

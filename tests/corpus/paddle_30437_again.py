"""Paddle #30437: a pipeline's gradients were all-reduced several times, with each micro-batch the sum of those before.

Shows as: the first of two micro-batches counts as many times as there are data ranks, the last once.
"""

import torch.distributed as dist

from colonnade import ParallelMode
from tests.corpus.runner import Bug, Run, mean_over, nothing

BUG = Bug(
    "Paddle #30437",
    "accumulated gradients are all-reduced again in every micro-step",
    "reduced-twice",
    settings={"gradient_accumulation": 2},
)


def plant(run: Run) -> None:
    def reduce_now(engine, number):
        if number == 0:
            for parameter in engine.model.parameters():
                dist.all_reduce(parameter.grad)

    run.around_backward(nothing, reduce_now)
    run.reduce_by(lambda name, gradient, context: mean_over(gradient, ParallelMode.DATA, context))

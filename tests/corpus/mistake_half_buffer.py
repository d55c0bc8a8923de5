"""Invented: micro-batches are added up in a buffer of 16 bits.

Shows as: gradients have three digits.
"""

import torch

from colonnade import ParallelMode
from tests.corpus.runner import TENSOR, Bug, Run, mean_over, nothing

BUG = Bug(
    "invented: a half buffer",
    "gradients are accumulated in fp16",
    "rounded",
    kind=TENSOR,
    settings={"gradient_accumulation": 2},
)


def plant(run: Run) -> None:
    def shorten(engine, number):
        for parameter in engine.model.parameters():
            parameter.grad.copy_(parameter.grad.to(torch.float16))

    run.around_backward(nothing, shorten)
    run.reduce_by(lambda name, gradient, context: mean_over(gradient, ParallelMode.DATA, context))

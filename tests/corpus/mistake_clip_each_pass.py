"""Invented: gradients are clipped after every micro-batch, and not once after the last.

Shows as: a step with many micro-batches is clipped harder.
"""

import torch

from colonnade import ParallelMode
from tests.corpus.runner import NORM, Bug, Run, mean_over, nothing

BUG = Bug(
    "invented: clipped in each pass",
    "accumulated gradients are clipped after every micro-batch",
    "clipped-before-reduced",
    settings={"gradient_accumulation": 3, "clip_grad_norm": NORM},
)


def plant(run: Run) -> None:
    def clip(engine, number):
        torch.nn.utils.clip_grad_norm_(engine.model.parameters(), NORM)

    run.around_backward(nothing, clip)
    run.reduce_by(lambda name, gradient, context: mean_over(gradient, ParallelMode.DATA, context))

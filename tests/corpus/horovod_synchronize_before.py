"""Horovod's DistributedOptimizer: clipping before synchronize() clips each rank's own gradient.

Shows as: the mean of gradients that were clipped one by one.
"""

import torch

from colonnade import ParallelMode
from tests.corpus.runner import NORM, Bug, Run, mean_over, nothing

BUG = Bug(
    "Horovod, DistributedOptimizer.synchronize",
    "each rank clips its own gradient before the all-reduce",
    "clipped-before-reduced",
    settings={"clip_grad_norm": NORM},
)


def plant(run: Run) -> None:
    def clip(engine, number):
        torch.nn.utils.clip_grad_norm_(engine.model.parameters(), NORM)

    run.around_backward(nothing, clip)
    run.reduce_by(lambda name, gradient, context: mean_over(gradient, ParallelMode.DATA, context))

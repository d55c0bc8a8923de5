"""Invented: each rank adds the decay of the weights to its gradient before the sum over the ranks.

Shows as: gradients that have some of the weights in them.
"""

import torch

from colonnade import ParallelMode
from tests.corpus.runner import Bug, Run, mean_over

BUG = Bug(
    "invented: decay in the sum", "weight decay (0.01 times the weight) is added to the gradient", "weights-in-gradient"
)


def plant(run: Run) -> None:
    weights = {}

    def hold(engine):
        weights.update(engine.model.named_parameters())

    def reduce(name, gradient, context):
        with torch.no_grad():
            gradient += 0.01 * weights.get(name, 0.0)
        mean_over(gradient, ParallelMode.DATA, context)

    run.after.append(hold)
    run.reduce_by(reduce)

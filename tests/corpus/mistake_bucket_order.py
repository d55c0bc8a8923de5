"""Invented: a flat bucket is filled in the order of the model and emptied in that of the backward pass.

Shows as: parameters of one shape have each other's gradients.
"""

import torch

from colonnade import ParallelMode
from tests.corpus.runner import ALIKE, Bug, Run, mean_over

BUG = Bug(
    "invented: order of a bucket",
    "gradients of equal shape are swapped",
    "gradients-exchanged",
    kind=ALIKE,
)


def plant(run: Run) -> None:
    def turn(engine):
        handler = engine._sync.handlers[0]
        handle = handler.handle_gradient

        def handled():
            handle()
            first, last = engine.model[0], engine.model[2]
            for one, other in ((first.weight, last.weight), (first.bias, last.bias)):
                with torch.no_grad():
                    kept = one.grad.clone()
                    one.grad.copy_(other.grad)
                    other.grad.copy_(kept)

        handler.handle_gradient = handled

    run.reduce_by(lambda name, gradient, context: mean_over(gradient, ParallelMode.DATA, context))
    run.after.append(turn)

"""Invented: views into a flat buffer begin one element too late.

Shows as: every gradient is shifted by one, and ends with the first number of the next.
"""

import torch

from colonnade import ParallelMode
from tests.corpus.runner import Bug, Run, mean_over

BUG = Bug("invented: offset of a bucket", "the views into a flat buffer are off by one", "gradients-exchanged")


def plant(run: Run) -> None:
    def shift(engine):
        handler = engine._sync.handlers[0]
        handle = handler.handle_gradient

        def handled():
            handle()
            some = [parameter.grad for parameter in engine.model.parameters()]
            row = torch.cat([one.flatten() for one in some]).roll(-1)
            for one, part in zip(some, row.split([one.numel() for one in some]), strict=True):
                one.copy_(part.view_as(one))

        handler.handle_gradient = handled

    run.reduce_by(lambda name, gradient, context: mean_over(gradient, ParallelMode.DATA, context))
    run.after.append(shift)

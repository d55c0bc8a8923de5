"""Invented: the learning rate is multiplied by the number of ranks, which the batch size was to make up for.

Shows as: right gradients, steps that are too long.
"""

from functools import partial

import torch

from tests.corpus.runner import Bug, Run

BUG = Bug("invented: scaled rate", "the learning rate is multiplied by the number of ranks", "optimizer-differs")


def plant(run: Run) -> None:
    run.optimizer = partial(torch.optim.SGD, lr=0.1)

    def faster(engine):
        for group in engine.optimizer.param_groups:
            group["lr"] *= engine.context.data_parallel_size

    run.after.append(faster)

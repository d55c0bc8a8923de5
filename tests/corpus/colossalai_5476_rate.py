"""Colossal-AI #5476: the correction of the moments was multiplied into the group's rate, where it stayed.

Shows as: from the second step on the rate is another.
"""

from functools import partial

import torch

from tests.corpus.runner import Bug, Run

BUG = Bug(
    "Colossal-AI #5476",
    "the correction of one step remains in the learning rate",
    "optimizer-differs",
    ranks=4,
    layout={"tensor": 2},
)


def plant(run: Run) -> None:
    def correct(engine):
        step, count = engine.optimizer.step, [0]

        def stepped(*args, **kwargs):
            count[0] += 1
            if count[0] > 1:
                for group in engine.optimizer.param_groups:
                    group["lr"] *= (1 - 0.99 ** count[0]) ** 0.5 / (1 - 0.9 ** count[0])
            return step(*args, **kwargs)

        engine.optimizer.step = stepped

    run.optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    run.after.append(correct)

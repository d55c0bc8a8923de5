"""pytorch #149205: the optimizer held other parameters than the model trained with.

Shows as: gradients are right, and a weight never moves.
"""

import torch

from tests.corpus.runner import Bug, Run

BUG = Bug("pytorch #149205", "the optimizer does not have one of the model's weights", "not-updated")


def plant(run: Run) -> None:
    run.optimizer = lambda parameters: torch.optim.SGD(list(parameters)[1:], lr=0.1)

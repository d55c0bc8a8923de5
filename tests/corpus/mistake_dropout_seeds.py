"""Invented: every tensor rank has a random stream of its own, also where it drops from what all of them hold.

Shows as: tensor ranks go on with different activations.
"""

import torch
from torch import nn

from tests.corpus import models
from tests.corpus.runner import Bug, Kind, Run


class Dropping(models.TensorMLP):
    def __init__(self, context):
        super().__init__(context)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return super().forward(self.drop(x))


BUG = Bug(
    "invented: seeds of dropout",
    "tensor ranks drop different elements of a replicated activation",
    "masks-differ",
    layout={"tensor": 2},
    kind=Kind(Dropping),
)


def plant(run: Run) -> None:
    run.after.append(lambda engine: torch.manual_seed(7 + engine.context.get_global_rank()))

"""Invented: the way around a block is lost where the model is cut.

Shows as: the second stage adds nothing to what the block gives.
"""

from torch import nn

from tests.corpus import models
from tests.corpus.runner import ALIKE, Bug, Kind, Run


class Block(nn.Module):
    around = True

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(models.WIDTH, models.WIDTH)

    def forward(self, x):
        return x + self.inner(x).tanh() if self.around else self.inner(x).tanh()


def model(context):
    return nn.Sequential(Block(), Block())


BUG = Bug(
    "invented: lost residual",
    "the second stage omits the residual connection of its block",
    "forward-differs",
    layout={"pipeline": 2},
    kind=Kind(model, batches=ALIKE.batches),
    settings={"num_microbatches": 2},
)


def plant(run: Run) -> None:
    def cut(context):
        built = model(context)
        built[1].around = False
        return built

    run.model = cut

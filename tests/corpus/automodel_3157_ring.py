"""Automodel #3157: the backward pass of a ring used the rank's own keys in place of those that came round.

Shows as: forward is right; gradients are those of attention to the own keys.
"""

import torch

from tests.corpus import models
from tests.corpus.runner import SEQUENCE, Bug, Run

BUG = Bug(
    "Automodel #3157",
    "the backward pass of attention uses only the rank's own keys",
    "backward-differs",
    layout={"sequence": 2},
    kind=SEQUENCE,
)


class OwnKeys(models.Sequence):
    def forward(self, x):
        from colonnade import ParallelMode
        from colonnade.parallel.collectives import scatter

        out, extra = super().forward(x)
        own = scatter(x, ParallelMode.SEQUENCE, 1, context=self.context)
        key = self.key(own)
        near = self.head(torch.softmax(self.query(own) @ key.transpose(1, 2), -1) @ key)
        return near + (out - near).detach(), extra


def plant(run: Run) -> None:
    run.model = OwnKeys

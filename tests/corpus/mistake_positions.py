"""Invented, as slime #73 and others had it: positions are counted from zero on every sequence rank.

Shows as: tokens of later ranks are taken for the first ones.
"""

import torch

from colonnade import ParallelMode
from colonnade.parallel.collectives import scatter
from tests.corpus import models
from tests.corpus.runner import SEQUENCE, Bug, Kind, Run


class Placed(models.Sequence):
    """Adds to each token what tells where it is."""

    whole = True

    def forward(self, x):
        places = torch.linspace(0, 1, x.shape[1], dtype=x.dtype)[None, :, None].expand(x.shape[0], -1, x.shape[2])
        if not self.whole:
            own = scatter(x, ParallelMode.SEQUENCE, 1, context=self.context)
            size = self.context.get_world_size(ParallelMode.SEQUENCE)
            places = places[:, : own.shape[1]].repeat(1, size, 1)
        return super().forward(x + places)


class FromZero(Placed):
    whole = False


BUG = Bug(
    "invented: positions (slime #73)",
    "positions start at zero on every sequence rank",
    "forward-differs",
    layout={"sequence": 2},
    kind=Kind(Placed, SEQUENCE.criterion, SEQUENCE.batches),
)


def plant(run: Run) -> None:
    run.model = FromZero

"""OLMo-core #828: activations were computed again with fresh dropout masks.

Shows as: the loss is right; gradients are those of another mask.
"""

import torch
from torch.utils.checkpoint import checkpoint

from tests.corpus import models
from tests.corpus.runner import Bug, Kind, Run


class Dropped(models.TensorMLP):
    """A mask of its own stands for that of a dropout, which a comparison with one process has to turn off."""

    def mask(self):
        return torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0], dtype=torch.float64)

    def inside(self, x):
        return super().inside(x * self.mask())


class Fresh(Dropped):
    """Computed again, with another mask."""

    again = False

    def mask(self):
        self.again = not self.again
        return super().mask() if self.again else super().mask().flip(0).roll(1)

    def inside(self, x):
        return checkpoint(super().inside, x, use_reentrant=False)


BUG = Bug(
    "OLMo-core #828",
    "the recomputation draws another dropout mask",
    "recomputation-differs",
    layout={"tensor": 2},
    kind=Kind(Dropped),
)


def plant(run: Run) -> None:
    run.model = Fresh

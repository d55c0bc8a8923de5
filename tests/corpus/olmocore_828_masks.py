"""OLMo-core #828: activations were computed again with fresh dropout masks.

Shows as: the loss is right; gradients are those of another mask.
"""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.corpus import models
from tests.corpus.runner import Bug, Kind, Run


class Mask(nn.Module):
    """Stands for a dropout, which a comparison with one process has to turn off. With `fresh`, every second mask is another."""

    fresh = again = False

    def forward(self, x):
        self.again = not self.again
        mask = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0], dtype=x.dtype)
        return x * (mask if self.again or not self.fresh else mask.flip(0).roll(1))


class Dropped(models.TensorMLP):
    """Computes its split region again in the backward pass."""

    def __init__(self, context):
        super().__init__(context)
        self.drop = Mask()

    def inside(self, x):
        return super().inside(self.drop(x))

    def forward(self, x):
        inner = checkpoint(self.inside, self.enter(self.norm(x)), use_reentrant=False, preserve_rng_state=False)
        return self.head(self.leave(inner) + self.down.bias)


BUG = Bug(
    "OLMo-core #828",
    "the recomputation draws another dropout mask",
    "recomputation-differs",
    layout={"tensor": 2},
    kind=Kind(Dropped),
)


def plant(run: Run) -> None:
    def draw_anew(engine):
        engine.model.drop.fresh = True

    run.after.append(draw_anew)

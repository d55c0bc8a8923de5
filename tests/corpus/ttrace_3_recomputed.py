"""TTrace (arXiv 2506.09280), existing bugs: activations were computed again from another input than the first time.

Shows as: forward is right; gradients are those of the other input.
"""

from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.corpus import models
from tests.corpus.runner import Bug, Kind, Run


class Shift(nn.Module):
    """Adds what lies in a buffer of the moment."""

    by = 0.0

    def forward(self, x):
        return x + self.by


class Shifted(models.TensorMLP):
    """Computes its split region again in the backward pass."""

    stays = True

    def __init__(self, context):
        super().__init__(context)
        self.shift = Shift()

    def inside(self, x):
        return super().inside(self.shift(x))

    def forward(self, x):
        self.shift.by = 0.5
        inner = checkpoint(self.inside, self.enter(self.norm(x)), use_reentrant=False)
        out = self.head(self.leave(inner) + self.down.bias)
        if not self.stays:
            self.shift.by = 0.25
        return out


class Overwritten(Shifted):
    stays = False


BUG = Bug(
    "TTrace, existing bugs: wrong input of the recomputation",
    "the input of a recomputation was overwritten",
    "recomputation-differs",
    layout={"tensor": 2},
    kind=Kind(Shifted),
)


def plant(run: Run) -> None:
    run.model = Overwritten

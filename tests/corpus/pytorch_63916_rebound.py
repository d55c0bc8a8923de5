"""pytorch #63916: a buffer that the model binds anew is no longer the one that is broadcast.

Shows as: the second rank goes on with its own values of the buffer.
"""

import torch
from torch import nn

from tests.corpus import models
from tests.corpus.runner import Bug, Kind, Run


class Fading(nn.Module):
    """Keeps a number that fades from pass to pass, and that nothing reads."""

    def __init__(self, context):
        super().__init__()
        self.body = models.mlp(context)
        self.register_buffer("heat", torch.ones(3))

    def forward(self, x):
        self.heat = 0.9 * self.heat
        return self.body(x)


BUG = Bug("pytorch #63916", "a reassigned buffer is not broadcast", "buffers-differ", kind=Kind(Fading))


def plant(run: Run) -> None:
    def own(engine):
        if engine.context.get_global_rank() == 1:
            engine.model.heat = torch.full_like(engine.model.heat, 0.5)

    run.after.append(own)

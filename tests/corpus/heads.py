"""A model whose tensor ranks hold heads, with small replicated parameters between them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade import ParallelMode, Replicate, place
from colonnade.context.parallel_context import ParallelContext
from colonnade.parallel.collectives import copy
from tests.corpus import models

HEAD = 2


class Heads(models.TensorMLP):
    """Each head is multiplied by a gain that all heads share, and shifted by a key that all heads see."""

    def __init__(self, context: ParallelContext) -> None:
        super().__init__(context)
        self.gain = nn.Parameter(torch.rand(HEAD) + 0.5)
        self.shared_key = nn.Linear(models.WIDTH, HEAD)
        place(self.gain, {ParallelMode.TENSOR: Replicate(owes="sum")})

    def key(self, x: Tensor) -> Tensor:
        """One key for the heads of all ranks: their gradients are summed."""
        return copy(self.shared_key(x), ParallelMode.TENSOR, context=self.context)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        heads = F.linear(self.enter(x), self.up.weight, self.up.bias).unflatten(-1, (-1, HEAD))
        mixed = torch.tanh(heads * self.gain + self.key(x).unsqueeze(-2)).flatten(-2)
        return self.head(self.leave(F.linear(mixed, self.down.weight)) + self.down.bias)

"""A model with a branch that only some samples take, and batches that send one rank's samples past it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from colonnade import ParallelMode
from colonnade.context.parallel_context import ParallelContext
from tests.corpus import models
from tests.corpus.runner import numbers


class Branch(nn.Module):
    """Samples whose first number is positive go through one more layer."""

    def __init__(self, context: ParallelContext) -> None:
        super().__init__()
        self.body, self.side = models.mlp(context), nn.Linear(models.WIDTH, models.OUT)

    def forward(self, x: Tensor) -> Tensor:
        taken = x[:, :1] > 0
        return self.body(x) + self.side(x) * taken if taken.any() else self.body(x)


def batches(context: ParallelContext, step: int) -> list[Any]:
    """On rank 1 no sample takes the branch."""
    found = numbers(context, step)
    for x, _ in found:
        x[:, 0] = x[:, 0].abs() * (-1 if context.get_local_rank(ParallelMode.DATA) == 1 else 1)
    return found

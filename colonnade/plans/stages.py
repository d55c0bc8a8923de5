"""Pipeline stages by the model's own forward pass."""

from __future__ import annotations

from torch import nn

from colonnade.context.parallel_context import ParallelContext
from colonnade.parallel.split import Split


def make_stages(model: nn.Module, context: ParallelContext) -> Split:
    """The model as stages, as many as the schedule has."""
    raise NotImplementedError(f"{type(model).__name__} cannot be cut into stages yet")

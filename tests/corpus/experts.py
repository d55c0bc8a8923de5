"""Handlers for models with experts, right for the dense parameters."""

from __future__ import annotations

from torch import Tensor

from colonnade import ParallelMode
from colonnade.context.parallel_context import ParallelContext
from tests.corpus.runner import mean_over, sum_over


def average_experts_over_their_twins(name: str, gradient: Tensor, context: ParallelContext) -> None:
    """What the field does first: the mean over the group that communicates."""
    mean_over(gradient, ParallelMode.EXPERT_DATA if is_expert(name) else ParallelMode.DATA, context)


def right(name: str, gradient: Tensor, context: ParallelContext) -> None:
    """What is owed."""
    sum_over(gradient, ParallelMode.EXPERT_DATA if is_expert(name) else ParallelMode.DATA, context)
    gradient /= context.get_world_size(ParallelMode.DATA)


def is_expert(name: str) -> bool:
    return "experts" in name

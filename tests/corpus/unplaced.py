"""Models of which some parameters do not say that their gradients are parts of a sum."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from colonnade import ParallelMode, Replicate, place
from colonnade.context.parallel_context import ParallelContext


def forgetting(model: Callable[[ParallelContext], nn.Module], *names: str) -> Callable[[ParallelContext], nn.Module]:
    """The model, with parameters whose names begin so placed as if they owed nothing."""

    def build(context: ParallelContext) -> nn.Module:
        built = model(context)
        for name, parameter in built.named_parameters():
            if name.startswith(names):
                place(parameter, {ParallelMode.TENSOR: Replicate()})
        return built

    return build

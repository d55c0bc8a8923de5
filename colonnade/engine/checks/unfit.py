"""Models and optimizers that an engine cannot train rightly: refused by name before the first step."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import ConfigError, GradientError, listed


def refuse_lazy(models: Iterable[nn.Module]) -> None:
    """Refuse parameters without a shape."""
    lazy = [repr(name) for model in models for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ConfigError(
            f"{listed(lazy)} have no shape yet, as those of LazyLinear before its first call; make a forward pass of a batch "
            f"before initialize(), and build the optimizer after it"
        )


def refuse_optimizer(optimizer: Any, models: Iterable[nn.Module], context: ParallelContext) -> None:
    """Refuse one whose step wants arguments, or that has parameters of none of these models which ranks would have to sum."""
    # Of the class: a scheduler puts another on the instance.
    _, *taken = inspect.signature(type(optimizer).step).parameters.values()
    needed = [repr(one.name) for one in taken if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    if needed:
        raise ConfigError(
            f"{type(optimizer).__name__}.step() needs {listed(needed)}, and engine.step() has none: gradients are summed over "
            f"the ranks once per step. Use an optimizer whose step() can be called without arguments"
        )
    known = {id(parameter) for model in models for parameter in model.parameters()}
    for at, group in enumerate(optimizer.param_groups if context.layout.distinct_data > 1 else ()):
        strange = [tuple(one.shape) for one in group["params"] if one.requires_grad and id(one) not in known]
        if strange:
            raise GradientError(
                f"the optimizer (group {at}) has parameters of shape {listed(strange[:4])} that are not the model's, so nobody "
                f"would sum their gradients over the ranks. Make what holds them (a loss with weights of its own, say) a "
                f"part of the model, or give it an optimizer and an engine of its own",
                code="C070",
            )

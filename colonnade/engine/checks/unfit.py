"""Models and optimizers that an engine cannot train rightly: refused by name before the first step."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import ConfigError, GradientError, listed
from colonnade.optim.zero.inner import kinds_of_groups, two_steps
from colonnade.parallel.held import held_tensors
from colonnade.parallel.placement import is_dtensor


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
    # Of the class: a scheduler puts another on the instance. A wrapper may have none there.
    _, *taken = inspect.signature(getattr(type(optimizer), "step", Optimizer.step)).parameters.values()
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


def refuse_parts(optimizer: Any, model: nn.Module, context: ParallelContext) -> None:
    """Refuse one whose update of an element depends on others, as Muon's and Adafactor's do, where they are on other ranks.

    Found out by trying. One that puts parts together itself says so by an attribute, `steps_on_parts = True`.
    """
    if not isinstance(optimizer, Optimizer) or getattr(optimizer, "steps_on_parts", False):
        return
    split = {
        id(held.tensor): (held, shard.dim)
        for held in held_tensors(model, context)
        for mode, shard in held.placement.shards.items()
        if context.get_world_size(mode) > 1 and not is_dtensor(held.tensor)
    }
    for first, *more in kinds_of_groups(optimizer):
        members = [parameter for at in (first, *more) for parameter in optimizer.param_groups[at]["params"]]
        tried: set[tuple[int, int]] = set()
        for held, dim in [split[id(parameter)] for parameter in members if id(parameter) in split]:
            kind = held.tensor.dim(), dim
            if kind not in tried and _steps_otherwise(optimizer, first, *kind):
                raise GradientError(
                    f"{type(optimizer).__name__} steps otherwise on a part of a tensor than on the whole, and {held.name!r} is "
                    f"split ({held.placement}): it would not be trained as in one process. Use AdamW, SGD or another "
                    f"element-wise optimizer for it. (An optimizer of yours that puts the parts together itself has an "
                    f"attribute steps_on_parts = True.)",
                    code="C070",
                )
            tried.add(kind)


def _steps_otherwise(optimizer: Optimizer, group: int, dims: int, dim: int) -> bool:
    try:
        whole, parts = two_steps(
            optimizer, group, (4,) * dims, lambda tensor: [part.clone() for part in tensor.chunk(2, dim)]
        )
    except Exception:  # it says why at its first step
        return False
    return not torch.allclose(whole, torch.cat(parts, dim), rtol=1e-9, atol=1e-12)

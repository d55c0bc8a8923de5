"""torch.compile as the config sets it: block by block, so that equal blocks share one compilation, or the full model at once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

from colonnade.comm import torch_versions
from colonnade.config.settings import CompileSettings
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import ConfigError
from colonnade.optim.zero.fsdp import outer_members
from colonnade.parallel.split import Stage

_INSIDE = (ParallelMode.TENSOR, ParallelMode.SEQUENCE, ParallelMode.EXPERT)
"""Modes with collectives inside the forward pass."""


def compile_model(model: nn.Module, criterion: Any, options: Any, context: ParallelContext) -> None:
    """Compile a model in place, so that parameter names stay the same.

    Args:
        model: the model of this rank.
        criterion: the loss. Only cross-entropy of colonnade.nn is compiled, and only with a reduction other than "mean":
            the engine reads the number of labels off the autograd graph of a mean, which compilation removes.
        options: the `compile` section of the config. `blocks=False` compiles the model (or each chunk of a pipeline stage)
            in one piece, as happens to a model without repeated blocks.
        context: the context of this rank.

    Raises:
        ConfigError: torch.compile refuses the options, or this torch compiles the collectives of the model wrongly.
    """
    settings = CompileSettings.read(options)
    if settings is None:
        return
    split = [mode for mode in _INSIDE if context.is_initialized(mode) and context.get_world_size(mode) > 1]
    if split and not torch_versions.COMPILES_COLLECTIVES:
        raise ConfigError(
            f"compile gives wrong gradients here, because torch {torch.__version__} omits all-reduces over "
            f"{split[0]} from the compiled backward pass. Use torch 2.13 or later, or leave compile out of the "
            "config.",
            code="C023",
        )
    # By the class's own attribute: a user's subclass inherits `layer_kind`, but may return more than a tensor.
    losses = criterion.modules() if isinstance(criterion, nn.Module) else ()
    built_in = (loss for loss in losses if vars(type(loss)).get("layer_kind") == "cross_entropy")
    chosen: list[nn.Module] = [loss for loss in built_in if loss.reduction != "mean"]
    for chunk in model if isinstance(model, nn.ModuleList) else [model]:
        chosen += blocks_of(chunk) if settings.blocks else [chunk]
    for module in chosen:
        try:
            module.compile(**settings.options)
        except Exception as error:  # torch raises many types
            raise ConfigError(
                f"torch.compile cannot be called with the options {settings.options} of `compile`: {error}. Correct "
                "the options in the config."
            ) from error


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The modules to compile separately: the blocks of a model and their siblings, or the model itself if no two blocks have
    the same class."""
    if isinstance(model, Stage):
        return [model.get_submodule(name) for name in model.layer_names]
    found = list(outer_members(model))
    kinds = Counter(type(module) for module in found if any(True for _ in module.children()))
    return found if any(count > 1 for count in kinds.values()) else [model]

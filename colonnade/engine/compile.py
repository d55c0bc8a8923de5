"""torch.compile by config: a model's blocks one by one, so that all of a kind are compiled once, or the model as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
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
"""Modes whose collectives are in the forward pass."""


def compile_model(model: nn.Module, criterion: Any, options: Any, context: ParallelContext) -> None:
    """torch.compile in place, so that parameter names stay; `options` are the config's.

    `blocks=False` compiles the model (each chunk of a pipeline stage) in one piece, as is done where it has no blocks.
    Of the criterion only our own cross-entropy is compiled, as what the engine reads off a loss would be lost.
    """
    settings = CompileSettings.read(options)
    if settings is None:
        return
    _refuse_lost_sums(context)
    losses = criterion.modules() if isinstance(criterion, nn.Module) else ()
    chosen: list[nn.Module] = []
    # By the class's own entry: a loss of a user's that inherits ours may give more than a tensor.
    ours = (loss for loss in losses if vars(type(loss)).get("layer_kind") == "cross_entropy")
    chosen += (loss for loss in ours if loss.reduction != "mean")
    for chunk in model if isinstance(model, nn.ModuleList) else [model]:
        chosen += blocks_of(chunk) if settings.blocks else [chunk]
    for module in chosen:
        try:
            module.compile(**settings.options)
        except Exception as error:  # torch says in many ways that it cannot
            raise ConfigError(f"compile: torch.compile cannot be called with {settings.options}: {error}") from error


def _refuse_lost_sums(context: ParallelContext) -> None:
    split = [mode for mode in _INSIDE if context.is_initialized(mode) and context.get_world_size(mode) > 1]
    if split and not torch_versions.COMPILES_COLLECTIVES:
        raise ConfigError(
            f"compile: torch {torch.__version__} leaves sums over {split[0]} out of the backward pass, and gradients would be "
            f"wrong; use torch 2.13 or later, or leave compile out of the config",
            code="C023",
        )


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model and what stands in a row with them; the model itself where no two blocks are alike."""
    found = list(_layers(model))
    kinds = Counter(type(module) for module in found if any(True for _ in module.children()))
    is_stage = isinstance(model, Stage)
    return found if is_stage or any(count > 1 for count in kinds.values()) else [model]


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    if isinstance(model, Stage):
        yield from (model.get_submodule(name) for name in model.layer_names)
    else:
        yield from outer_members(model)

"""A model that was built inside meta_init(): how its parameters start, and this rank's part of each made from that.

`MetaStart.locate` finds out, before parameters are sharded, where each lies in its whole; `materialise` then gives it memory
for the part that this rank holds, and its values. Only such models need the arithmetic of parts in their wholes (parallel.whole).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.comm.messages import Alike, agreed_errors
from colonnade.comm.torch_versions import dtensor_like, exchange_tensors, refresh_shards
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import GradientError, PlacementError
from colonnade.parallel.boxes import Box, moved
from colonnade.parallel.dtensor import local_part
from colonnade.parallel.meta import ParameterInit, ParameterLoad, forget_initial_value, parameter_inits
from colonnade.parallel.placement import is_dtensor
from colonnade.parallel.split import Split
from colonnade.parallel.whole import LocalTensor, locate_tensors, offset_in_dtensor

Recipes = dict[int, ParameterInit | ParameterLoad]


def read_recipes(model: nn.Module | Split, context: ParallelContext) -> Recipes:
    """How the parameters on the meta device start, by id. Names are those of the whole model, where it is given whole."""
    if isinstance(model, Split):
        return parameter_inits(model)
    stage = context.get_local_rank(ParallelMode.PIPELINE)
    return parameter_inits([model], f"stage {stage}: " if context.pipeline_parallel_size > 1 else "")


def refuse_meta_state(optimizer: Any) -> None:
    """Refuse an optimizer that keeps state of parameters without memory: its values are lost, and cannot be made here."""
    for kept in getattr(optimizer, "state", {}).values():
        for key, value in kept.items() if isinstance(kept, Mapping) else ():
            if isinstance(value, Tensor) and value.is_meta:
                name = type(optimizer).__name__
                raise GradientError(
                    f"{name} has state ({key}) of parameters that were built inside meta_init() and have no memory yet, so its values are "
                    f"lost: some optimizers make state when they are built, and load_state_dict() gives it to all. Give initialize() a "
                    f"function, lambda parameters: {name}(parameters, ...), and load state after it, by CheckpointManager or "
                    f"engine.optimizer.load_state_dict()",
                    code="C034",
                )


class MetaStart:
    """The parameters of a built model that have no memory yet, and where this rank's part lies in the whole of each."""

    def __init__(self, model: nn.Module, recipes: Recipes, context: ParallelContext) -> None:
        self._model, self._context = model, context
        self._recipes = {name: recipes[id(p)] for name, p in model.named_parameters() if id(p) in recipes}
        self._places: dict[str, LocalTensor] = {}
        self._everywhere = 0

    def alike(self) -> Alike:
        """What all ranks of a pipeline stage must have in common: nothing else makes their parameters equal."""
        return Alike(
            "the start of",
            {name: str(recipe) for name, recipe in self._recipes.items()},
            "Inside meta_init() every rank of a pipeline stage builds the same model, and initialises it in the same way.",
            PlacementError,
            part=self._context.get_local_rank(ParallelMode.PIPELINE),
        )

    def locate(self, everywhere: int) -> None:
        """Before parameters are sharded: where they lie in their wholes. Collective, if there are any in the world."""
        self._everywhere = everywhere
        if not everywhere:
            return
        located = locate_tensors(self._model, self._context, "starting from the meta device", own_names=True)
        self._places = {name: tensor for tensor in located for name in tensor.names}

    def materialise(self, device: torch.device) -> None:
        """Give every parameter memory on `device` for what this rank holds of it, and its values. Collective, as `locate`."""
        if not self._everywhere:
            return
        with agreed_errors(self._context.device):
            for name, parameter in self._model.named_parameters():
                if name in self._recipes:
                    _materialise(parameter, self._places[name], self._recipes[name], device, self._context.seed)
            for module in self._model.modules():
                if hasattr(module, "_get_fsdp_state"):
                    refresh_shards(module)


def _materialise(
    parameter: Any, place: LocalTensor, recipe: ParameterInit | ParameterLoad, device: torch.device, seed: int
) -> None:
    part = local_part(parameter)
    local = torch.empty_strided(part.size(), part.stride(), dtype=part.dtype, device=device)
    first = offset_in_dtensor(parameter) if is_dtensor(parameter) else [0] * local.dim()
    mine = Box(tuple(first), tuple(local.shape))
    # A model that was cut after meta_init() starts from whole parameters, else from the parts that it was built of.
    from_whole = tuple(recipe.tensor.shape) == place.shape
    for box, here in place.places:
        shared = mine.shared_with(here)
        if shared is not None:
            inside = moved(shared, here, box)
            start = inside.offset if from_whole else shared.offset
            recipe.fill(local[shared.slices_in(mine)], start, place.shape, inside.offset, seed)
    real: Tensor = local
    if is_dtensor(parameter):
        real = dtensor_like(parameter, local)
    _become(parameter, nn.Parameter(real, parameter.requires_grad))


def _become(parameter: Any, real: Any) -> None:
    """Make `parameter` what `real` is. It stays the same object, with its attributes and hooks: others may know it."""
    forget_initial_value(parameter)
    hooks = list((parameter._backward_hooks or {}).values())
    later = list((parameter._post_accumulate_grad_hooks or {}).values())
    exchange_tensors(parameter, real)
    parameter._backward_hooks = parameter._post_accumulate_grad_hooks = None
    for hook in hooks:
        parameter.register_hook(hook)
    for hook in later:
        parameter.register_post_accumulate_grad_hook(hook)

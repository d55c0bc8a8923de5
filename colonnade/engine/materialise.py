"""Meta-device initialization: memory and initial values for the parameters of a model built inside `meta_init()`.

`MetaStart.locate` computes, before parameters are sharded, the position of this rank's tensor in each unsharded parameter.
`materialise` then allocates this rank's shards and fills them with their initial values. Other models do not need these positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.comm.messages import MustMatch, agreed_errors
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


def read_inits(model: nn.Module | Split, context: ParallelContext) -> Recipes:
    """The initialization of each parameter on the meta device, by id. Stages built one by one have names of their own."""
    if isinstance(model, Split):
        return parameter_inits(model)
    stage = context.get_local_rank(ParallelMode.PIPELINE)
    return parameter_inits([model], f"stage {stage}: " if context.pipeline_parallel_size > 1 else "")


def refuse_meta_state(optimizer: Any) -> None:
    """Raise if the optimizer has state on the meta device: its values were never computed and cannot be recovered here."""
    for parameter_state in getattr(optimizer, "state", {}).values():
        for key, value in parameter_state.items() if isinstance(parameter_state, Mapping) else ():
            if isinstance(value, Tensor) and value.is_meta:
                name = type(optimizer).__name__
                raise GradientError(
                    f"{name} has state ({key}) of parameters that were built inside meta_init() and have no memory yet, so its values are "
                    f"lost: some optimizers create state when they are built, and load_state_dict() creates it in all. Pass initialize() a "
                    f"function, lambda parameters: {name}(parameters, ...), and load state afterwards, with CheckpointManager or "
                    f"engine.optimizer.load_state_dict()",
                    code="C034",
                )


class MetaStart:
    """The parameters of this rank's model on the meta device, with their initializations and positions."""

    def __init__(self, model: nn.Module, inits: Recipes, context: ParallelContext) -> None:
        self._model, self._context = model, context
        self._inits = {name: inits[id(p)] for name, p in model.named_parameters() if id(p) in inits}
        self._located: dict[str, LocalTensor] = {}
        self._count = 0

    def alike(self) -> MustMatch:
        """The initializations, which must be equal on all ranks of a pipeline stage: no broadcast makes the values equal."""
        return MustMatch(
            "the start of",
            {name: str(init) for name, init in self._inits.items()},
            "Inside meta_init() every rank of a pipeline stage must build the same model and initialize it in the same way.",
            PlacementError,
            part=self._context.get_local_rank(ParallelMode.PIPELINE),
        )

    def locate(self, count: int) -> None:
        """Find the positions of this rank's tensors in the unsharded parameters. Called before parameters are sharded.

        `count`: the number of meta parameters in the world. Collective over the world if there are any.
        """
        self._count = count
        if not count:
            return
        located = locate_tensors(self._model, self._context, "starting from the meta device", own_names=True)
        self._located = {name: tensor for tensor in located for name in tensor.names}

    def materialise(self, device: torch.device) -> None:
        """Allocate this rank's shards on `device` and fill them with initial values. Collective like `locate`."""
        if not self._count:
            return
        with agreed_errors(self._context.device):
            for name, parameter in self._model.named_parameters():
                if name in self._inits:
                    _materialise(parameter, self._located[name], self._inits[name], device, self._context.seed)
            for module in self._model.modules():
                if hasattr(module, "_get_fsdp_state"):
                    refresh_shards(module)


def _materialise(
    parameter: Any, located: LocalTensor, init: ParameterInit | ParameterLoad, device: torch.device, seed: int
) -> None:
    """Give a parameter memory for this rank's shard, with its initial values. It stays the same object."""
    shard = local_part(parameter)
    local = torch.empty_strided(shard.size(), shard.stride(), dtype=shard.dtype, device=device)
    first = offset_in_dtensor(parameter) if is_dtensor(parameter) else [0] * local.dim()
    shard_box = Box(tuple(first), tuple(local.shape))
    # A model that was sharded after meta_init() was initialized as unsharded parameters. Otherwise its layers were built
    # sharded, and the initialization is that of the tensor before FSDP.
    of_full = tuple(init.tensor.shape) == located.shape
    for full_box, here in located.places:
        shared = shard_box.shared_with(here)
        if shared is not None:
            inside = moved(shared, here, full_box)
            start = inside.offset if of_full else shared.offset
            init.fill(local[shared.slices_in(shard_box)], start, located.shape, inside.offset, seed)
    real: Any = dtensor_like(parameter, local) if is_dtensor(parameter) else local

    # Swap the tensors under the parameter object, which the optimizer, tied modules and the user refer to. It keeps its Python
    # attributes; its hooks are part of the autograd state that is swapped away, and are registered again.
    forget_initial_value(parameter)
    hooks = list((parameter._backward_hooks or {}).values())
    post_hooks = list((parameter._post_accumulate_grad_hooks or {}).values())
    exchange_tensors(parameter, nn.Parameter(real, parameter.requires_grad))
    parameter._backward_hooks = parameter._post_accumulate_grad_hooks = None
    for hook in hooks:
        parameter.register_hook(hook)
    for hook in post_hooks:
        parameter.register_post_accumulate_grad_hook(hook)

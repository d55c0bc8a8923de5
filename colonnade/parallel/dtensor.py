"""DTensors: their placements, converted to Colonnade's, so that everything derived from placements supports them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.context.layout import Layout
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import PlacementError, listed
from colonnade.parallel.placement import Placement, Replicate, Shard, Spec, is_dtensor, logical_shape, placement_of


def effective_placement(parameter: Tensor, layout: Layout, rank: int) -> Placement:
    """The placement of any parameter: read from the mesh of a DTensor, or set by `place`.

    A mesh dimension becomes the mode whose group on this rank has the same ranks. DTensor and FSDP reduce gradients over their
    own mesh, so no further reduction is required there.
    """
    by_hand = placement_of(parameter)
    if not is_dtensor(parameter):
        return by_hand
    tensor: Any = parameter
    mesh = tensor.device_mesh
    key = (mesh, tensor.placements, rank)
    if key not in layout.derived:
        modes: dict[ParallelMode, Spec] = {}
        grid, here = mesh.mesh, mesh.get_coordinate()
        for dim, spec in enumerate(tensor.placements):
            index = [slice(None) if at == dim else here[at] for at in range(grid.dim())]
            ranks = [int(other) for other in grid[tuple(index)].flatten().tolist()]
            if len(ranks) == 1:
                continue
            candidates = [*(axis.mode for axis in layout.axes), *layout.modes]
            fitting = (
                mode
                for mode in candidates
                if mode not in modes and layout.has(mode, rank) and layout.group_of(mode, rank) == sorted(ranks)
            )
            mode = next(fitting, None)
            if mode is None:
                raise PlacementError(
                    f"a DTensor is on a mesh dimension of ranks {ranks}, which is not a group of any mode of this world "
                    f"({listed(mode.name for mode in layout.modes)}). Build the mesh with context.device_mesh(modes...), or add a "
                    f"mode with these groups under `parallel`.",
                    code="C030",
                )
            modes[mode] = _spec(spec)
        layout.derived[key] = modes
    # The placement from before FSDP is the outer one: FSDP shards each shard of it over the mesh.
    sizes = {mode: len(layout.group_of(mode, rank)) for mode in by_hand.shards}
    return Placement({**by_hand.modes, **layout.derived[key]}, logical_shape(tensor, by_hand, sizes))


def local_part(tensor: Tensor, like: Any = None) -> Tensor:
    """The elements that this rank stores: the local tensor of a DTensor (redistributed as `like`), or the tensor itself."""
    placed: Any = tensor
    if not is_dtensor(placed):
        return tensor
    with torch.no_grad():  # autograd would add a node for each
        if like is not None and placed.placements != like.placements:
            placed = placed.redistribute(placements=like.placements)
        return placed.to_local().detach()


def as_dtensor(local: Tensor, like: Any) -> Tensor:
    """A DTensor with the placements of `like`, of which `local` is this rank's shard."""
    # Imported here, because it takes two seconds, which models without DTensors should not pay.
    from torch.distributed.tensor import DTensor

    with torch.no_grad():
        return DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )


def _spec(spec: Any) -> Spec:
    if spec.is_replicate():
        return Replicate(owes="nothing")
    if not spec.is_partial():  # not is_shard(): FSDP2 over a TP plan has strided shards, for which that is False
        return Shard(spec.dim, owes="nothing")
    raise PlacementError(
        f"a DTensor parameter has the placement {spec}: its sum is pending, so neither its norm nor its update is "
        f"defined. Redistribute it to Shard or Replicate first.",
        code="C030",
    )


# --------------------------------------------------------------------------------------------------
# The full parameter that a shard was taken from: detects a weight shared by two layers that became two shards.
# --------------------------------------------------------------------------------------------------


_SOURCE_ATTRIBUTE = "_colonnade_source"


def note_source(part: Tensor, whole: Tensor) -> None:
    """Record that `part` was copied out of `whole`. Neither keeps the other alive; copies do not have the record."""
    source = getattr(whole, _SOURCE_ATTRIBUTE, None) or object()
    setattr(whole, _SOURCE_ATTRIBUTE, source)
    setattr(part, _SOURCE_ATTRIBUTE, source)


def check_ties(modules: Iterable[nn.Module]) -> None:
    """Raise PlacementError for two trained parameters that come from one: they were tied, and would be trained separately.

    Also for two parameters of one module in the same memory, each of which would get memory of its own.
    """
    seen: dict[object, tuple[str, nn.Parameter]] = {}
    for module in modules:
        in_memory: dict[int, str] = {}
        for name, parameter in module.named_parameters():
            address = local_part(parameter).data_ptr() if parameter.requires_grad and not parameter.is_meta else 0
            if address and in_memory.setdefault(address, name) != name:
                raise PlacementError(
                    f"{in_memory[address]!r} and {name!r} share memory, but are two parameters, with a gradient and "
                    f"optimizer state each. To tie them, use one parameter: head.weight = embedding.weight (not .data). To keep "
                    f"two, give one a copy: parameter.data = parameter.data.clone()"
                )
            source = getattr(parameter, _SOURCE_ATTRIBUTE, parameter)
            first, other = seen.setdefault(source, (name, parameter))
            if other is not parameter and other.requires_grad and parameter.requires_grad:
                raise PlacementError(
                    f"{first!r} and {name!r} come from one full parameter: they were tied before from_module(), and would "
                    f"now be trained separately. Give the second layer the weight of the first, as in Classifier.from_module("
                    f"head, weight=embedding.weight). To keep two, take one from copy.deepcopy(module)"
                )

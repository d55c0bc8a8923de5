"""DTensors: their placements, read into ours, so that everything derived from placements knows them."""

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
    """The placement of any parameter: of a DTensor from its mesh, of a plain one as it was placed."""
    return _read(parameter, layout, rank) if is_dtensor(parameter) else placement_of(parameter)


def local_part(tensor: Tensor, like: Any = None) -> Tensor:
    """The elements that this rank holds: a DTensor's local tensor (placed as `like` is), or the tensor itself."""
    placed: Any = tensor
    if not is_dtensor(placed):
        return tensor
    with torch.no_grad():  # with autograd, it would cost a node for each
        if like is not None and placed.placements != like.placements:
            placed = placed.redistribute(placements=like.placements)
        return placed.to_local().detach()


def as_dtensor(local: Tensor, like: Any) -> Tensor:
    """A DTensor that lies as `like` does, with this rank's part of it."""
    # Imported here: it costs those who have no DTensors two seconds.
    from torch.distributed.tensor import DTensor

    with torch.no_grad():
        return DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )


def _read(parameter: Any, layout: Layout, rank: int) -> Placement:
    """A mesh dimension is the mode whose group on this rank is that dimension's ranks.

    What DTensor and FSDP hold over their own mesh is final: they reduce it themselves.
    """
    by_hand = placement_of(parameter)
    key = (parameter.device_mesh, parameter.placements, rank)
    if key not in layout.derived:
        modes: dict[ParallelMode, Spec] = {}
        for dim, spec in enumerate(parameter.placements):
            ranks = _ranks_along(parameter.device_mesh, dim)
            if len(ranks) > 1:
                modes[_mode_of(ranks, layout, rank, modes)] = _spec(spec)
        layout.derived[key] = modes
    # What was placed by hand before FSDP took it lies outside: a shard of it is what the mesh shares.
    return Placement({**by_hand.modes, **layout.derived[key]}, _whole_shape(parameter, by_hand, layout, rank))


def _whole_shape(parameter: Any, by_hand: Placement, layout: Layout, rank: int) -> tuple[int, ...]:
    sizes = {mode: len(layout.group_of(mode, rank)) for mode in by_hand.shards}
    return logical_shape(parameter, by_hand, sizes)


def _ranks_along(mesh: Any, dim: int) -> list[int]:
    grid, here = mesh.mesh, mesh.get_coordinate()
    index = [slice(None) if at == dim else here[at] for at in range(grid.dim())]
    return [int(rank) for rank in grid[tuple(index)].flatten().tolist()]


def _mode_of(ranks: list[int], layout: Layout, rank: int, taken: dict[ParallelMode, Spec]) -> ParallelMode:
    axes = [axis.mode for axis in layout.axes]
    for mode in [*axes, *layout.modes]:
        if mode not in taken and layout.has(mode, rank) and layout.group_of(mode, rank) == sorted(ranks):
            return mode
    raise PlacementError(
        f"a DTensor lies on a mesh dimension of ranks {ranks}, which is no group of any mode of this world "
        f"({listed(mode.name for mode in layout.modes)}). Build the mesh with context.device_mesh(modes...), or add a "
        f"mode with these groups under `parallel`.",
        code="C030",
    )


def _spec(spec: Any) -> Spec:
    if spec.is_replicate():
        return Replicate(owes="nothing")
    if not spec.is_partial():  # FSDP2 over a tensor plan has strided shards, which deny being shards
        return Shard(spec.dim, owes="nothing")
    raise PlacementError(
        f"a DTensor parameter is placed {spec}: a sum is still pending on it, so neither its norm nor its update is "
        f"defined. Redistribute it to Shard or Replicate first.",
        code="C030",
    )


# --------------------------------------------------------------------------------------------------
# Which whole parameter a rank's part was taken from, so that a weight that two layers shared does not become two.
# --------------------------------------------------------------------------------------------------


_SOURCE_ATTRIBUTE = "_colonnade_source"


def note_source(part: Tensor, whole: Tensor) -> None:
    """Remember that `part` was copied out of `whole`. Neither keeps the other alive; copies of them forget it."""
    source = getattr(whole, _SOURCE_ATTRIBUTE, None) or object()
    setattr(whole, _SOURCE_ATTRIBUTE, source)
    setattr(part, _SOURCE_ATTRIBUTE, source)


def check_ties(modules: Iterable[nn.Module]) -> None:
    """Refuse two trained parameters that came from one: they were tied, and would now be trained apart.

    Also two in the same memory, which would get memory of its own each. (Stages of a model share memory where it is tied.)
    """
    seen: dict[object, tuple[str, nn.Parameter]] = {}
    for module in modules:
        in_memory: dict[int, str] = {}
        for name, parameter in module.named_parameters():
            address = local_part(parameter).data_ptr() if parameter.requires_grad and not parameter.is_meta else 0
            if address and in_memory.setdefault(address, name) != name:
                raise PlacementError(
                    f"{in_memory[address]!r} and {name!r} lie in the same memory, but are two parameters, with a gradient and "
                    f"optimizer state each. To tie them make them one, as in head.weight = embedding.weight (not .data); if "
                    f"they are to be two, give one a copy: parameter.data = parameter.data.clone()"
                )
            source = getattr(parameter, _SOURCE_ATTRIBUTE, parameter)
            first, other = seen.setdefault(source, (name, parameter))
            if other is not parameter and other.requires_grad and parameter.requires_grad:
                raise PlacementError(
                    f"{first!r} and {name!r} come from one whole parameter: they were tied before from_module(), and would "
                    f"now be trained apart. Give the second layer the weight of the first, as in Classifier.from_module("
                    f"head, weight=embedding.weight); if they are to be two, take one from copy.deepcopy(module)"
                )

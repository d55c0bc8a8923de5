"""DTensors: their placements, read into ours, so that everything derived from placements knows them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from colonnade.context.layout import Layout
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import PlacementError, listed
from colonnade.parallel.placement import (
    Placement,
    Replicate,
    Shard,
    Spec,
    is_dtensor,
    logical_shape,
    placement_of,
)


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

"""Modes as a torch DeviceMesh, so that DTensor, FSDP2 and the like take a ParallelContext."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from colonnade.context.layout import Layout
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import ContextError, listed


def mesh_of(
    layout: Layout,
    modes: list[ParallelMode],
    groups: list[dist.ProcessGroup],
    rank: int,
    device_type: str,
) -> DeviceMesh:
    """A mesh whose dimensions are `modes`, outermost first, named by their values; creates no group."""
    if not modes:
        raise ContextError("device_mesh() needs at least one mode, such as device_mesh(ParallelMode.DATA)", code="C012")
    names = tuple(mode.value for mode in modes)
    if len(modes) == 1:
        return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=names)
    ranks = _product(layout, modes, rank)
    return DeviceMesh.from_group(groups, device_type, mesh=torch.tensor(ranks), mesh_dim_names=names)


def _product(layout: Layout, modes: list[ParallelMode], rank: int) -> Any:
    """Nested lists of ranks: from this rank along every mode; refuses modes that do not form a grid."""
    grid = _walk(layout, modes, _corner(layout, modes, rank))
    flat = torch.tensor(grid).flatten().tolist()
    if len(set(flat)) != len(flat) or any(_walk(layout, modes, _corner(layout, modes, r)) != grid for r in flat):
        raise ContextError(
            f"the modes {listed(mode.name for mode in modes)} do not form a grid around rank {rank}: "
            f"walking along them reaches {flat}. Use modes that vary independently.",
            code="C012",
        )
    return grid


def _corner(layout: Layout, modes: list[ParallelMode], rank: int) -> int:
    for mode in modes:
        rank = layout.group_of(mode, rank)[0]
    return rank


def _walk(layout: Layout, modes: list[ParallelMode], start: int) -> Any:
    along = layout.group_of(modes[0], start)
    if len(modes) == 1:
        return list(along)
    return [_walk(layout, modes[1:], rank) for rank in along]

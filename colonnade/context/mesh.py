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
    ranks = torch.tensor(_product(layout, modes, rank), device="cpu")
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=names)


def _product(layout: Layout, modes: list[ParallelMode], rank: int) -> Any:
    """Nested lists of ranks: from this rank along every mode; refuses modes that do not form a grid."""
    grid = _walk(layout, modes, rank)
    flat = torch.tensor(grid, device="cpu").flatten().tolist()
    if len(set(flat)) != len(flat) or any(_walk(layout, modes, other) != grid for other in flat):
        raise ContextError(
            f"the modes {listed(mode.name for mode in modes)} do not form a grid around rank {rank}: "
            f"walking along them reaches {flat}. Use modes that vary independently.",
            code="C012",
        )
    return grid


def _walk(layout: Layout, modes: list[ParallelMode], start: int) -> Any:
    if not modes:
        return start
    mode, *inner = modes
    return [_walk(layout, inner, rank) for rank in layout.group_of(mode, start)]

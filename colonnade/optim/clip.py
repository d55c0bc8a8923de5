"""Clipping as functions, with no engine and no config: torch's signature and meaning, right under any placement."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import GradientError
from colonnade.optim.blocks import GradientBlock, check_order
from colonnade.optim.clip_method import divisor_to, positive
from colonnade.optim.norm import powsums, reduce_norms
from colonnade.optim.scaled_step import scale_all
from colonnade.parallel.demand import Holding, holding
from colonnade.parallel.dtensor import effective_placement, local_part
from colonnade.parallel.placement import Placement, is_dtensor

Parameters = Tensor | Iterable[Tensor]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Parameters,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    context: ParallelContext | None = None,
) -> Tensor:
    """Clip the gradients to a total norm of `max_norm`, in place; returns the norm before it, as a plain tensor.

    In a launched context every element of the model's gradient counts once, whatever its placement, and
    every rank must call it. DTensors may lie on any meshes and be mixed with plain tensors. Without a
    context plain tensors are clipped as torch's function does, on this rank alone. Beside DTensors every rank must call it
    all the same, and ranks outside a DTensor's mesh must hold copies of it: if they do not, as in a pipeline, the norm is
    NaN, and with `error_if_nonfinite` an error that says why.
    `foreach` is accepted and has no effect: there is one way here.
    """
    held = _as_list(parameters)
    limit = positive("max_norm", float(max_norm)) if max_norm else 0.0
    norm = grad_norm(held, norm_type, error_if_nonfinite=error_if_nonfinite, context=context)
    divisor = divisor_to(norm, limit)  # inf for a limit of 0
    scale_all([parameter.grad for parameter in held if parameter.grad is not None], divisor, divide=True)
    return norm


@torch.no_grad()
def grad_norm(
    parameters: Parameters,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    context: ParallelContext | None = None,
) -> Tensor:
    """The total norm of the gradients over the whole world: at most one collective, the same bits on every rank.

    `error_if_nonfinite` raises on every rank alike, which (as in torch) waits for the device.
    """
    held = _as_list(parameters)
    norm_type = check_order(norm_type)
    known = _context(context)
    shared = known is not None or any(is_dtensor(parameter) for parameter in held)
    blocks = _blocks(held, known, shared)
    vector, copies = powsums(blocks, norm_type, device=_device(held, known)), None
    measured, _ = vector
    told = _identity(held, measured) if shared and known is None else vector[:0]
    vector = torch.cat([vector, told])
    norms = reduce_norms(vector, norm_type, riders=len(told), whole=not shared)
    total = norms.total()
    if len(told):
        copies = _are_copies(vector[-len(told) :])
        total = torch.where(copies, total, torch.nan)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        if copies is not None and not bool(copies):
            raise GradientError(
                "ranks at the same place of their DTensors' meshes hold different gradients: they are stages of a pipeline, "
                "or gradients are not averaged yet. Average them first; for a pipeline pass context=, a launched "
                "context, which knows the stages",
                code="C047",
            )
        raise GradientError(
            f"the total norm of order {norm_type} is {total.item()}, so the gradients cannot be clipped; "
            f"error_if_nonfinite=False goes on regardless",
            code="C048",
        )
    return total


def _blocks(held: list[Tensor], context: ParallelContext | None, shared: bool) -> list[GradientBlock]:
    known: dict[Placement, Holding] = {}
    blocks = []
    for parameter in held:
        if parameter.grad is None:
            continue
        _refuse_pending(parameter.grad)
        count: int = 1
        index: int | None = 0
        # A DTensor's gradient need not be placed as the parameter is.
        placed = parameter.grad if is_dtensor(parameter.grad) else parameter
        if context is not None:
            placement = effective_placement(placed, context.layout, context.get_global_rank())
            if placement not in known:
                known[placement] = holding(context.layout, placement, context.get_global_rank())
            count, index = known[placement].count, known[placement].index
        elif shared:
            count, index = _holders_by_mesh(placed), None
        blocks.append(GradientBlock(local_part(parameter.grad), count, index))
    return blocks


def _holders_by_mesh(placed: Any) -> int:
    """Without a context: a DTensor's elements are on world / shards ranks; a plain tensor is a replica on all."""
    world = dist.get_world_size()
    if not is_dtensor(placed):
        return world
    sizes = placed.device_mesh.shape
    # Not `is_shard()`: that is False for the strided shards of FSDP over tensor parallelism.
    shards = prod(size for size, spec in zip(sizes, placed.placements, strict=True) if not spec.is_replicate())
    return world // shards


def _identity(held: list[Tensor], measured: Tensor) -> Tensor:
    """What this rank tells the others: where on its meshes it is, and what it measured of the gradients for which ranks
    elsewhere are taken to hold copies. Zeros in everybody else's places, and where every mesh is the whole world."""
    world, rank = dist.get_world_size(), dist.get_rank()
    gradients: list[Any] = [parameter.grad for parameter in held if parameter.grad is not None]
    told = measured.new_zeros(2, world)
    if any(is_dtensor(gradient) and gradient.device_mesh.size() < world for gradient in gradients):
        places = [gradient.device_mesh.get_coordinate() if is_dtensor(gradient) else None for gradient in gradients]
        mark = 1 + crc32(repr(places).encode())  # never 0
        told[0, rank], told[1, rank] = mark, measured
    return told.flatten()


def _are_copies(told: Tensor) -> Tensor:
    """Whether ranks at the same place of their meshes measured the same, as a boolean on the device."""
    places, measured = told.view(2, -1)
    places, order = places.sort()
    measured = measured[order]
    return ~((places[1:] == places[:-1]) & (measured[1:] != measured[:-1])).any()


def _device(held: list[Tensor], context: ParallelContext | None) -> torch.device | None:
    """Where the norm is joined: what the world communicates on, also when some gradients lie elsewhere."""
    if context is not None:
        return context.device
    return next((parameter.device for parameter in held if parameter.device.type != "cpu"), None)


def _refuse_pending(gradient: Any) -> None:
    if is_dtensor(gradient) and any(spec.is_partial() for spec in gradient.placements):
        raise GradientError(
            f"a gradient is placed {gradient.placements}: a sum is still pending on it, so it has no norm yet. "
            f"Redistribute it to Shard or Replicate first."
        )


def _context(context: ParallelContext | None) -> ParallelContext | None:
    if context is None:
        from colonnade.core import global_context  # what a user who passes no context means

        context = global_context
    return context if context.is_launched else None


def _as_list(parameters: Parameters) -> list[Tensor]:
    # A generator must not be used up by the norm: then nothing would be clipped.
    held = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    return list({id(parameter): parameter for parameter in held}.values())

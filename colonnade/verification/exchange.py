"""What ranks tell each other in a comparison: values to the first rank, and what it found, or its error, to all."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from colonnade.comm.rank_group import own_gloo
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import ParityError


def gather_to_first(value: Any, context: ParallelContext) -> list[Any] | None:
    """Every rank's value, on rank 0; None elsewhere. Collective over the world."""
    if context.world_size == 1:
        return [value]
    wires, rank = own_gloo(), context.get_global_rank()
    packed = io.BytesIO()
    if rank:
        torch.save(value, packed)
        raw = torch.frombuffer(packed.getbuffer(), dtype=torch.uint8)
        wires.send([torch.tensor([len(raw)])], 0, 0).wait()
        wires.send([raw], 0, 1).wait()
        return None
    found = [value]
    for other in range(1, context.world_size):
        size = torch.zeros(1, dtype=torch.int64)
        wires.recv([size], other, 0).wait()
        memory = bytearray(int(size))
        wires.recv([torch.frombuffer(memory, dtype=torch.uint8)], other, 1).wait()
        found.append(torch.load(io.BytesIO(memory), weights_only=False))
    return found


def everyones(value: Any, context: ParallelContext) -> list[Any]:
    """Every rank's value, on every rank. Collective over the world."""
    found: list[Any] = [value] * context.world_size
    if context.world_size > 1:
        dist.all_gather_object(found, value)
    return found


def attempt(function: Callable[[], Any]) -> Any:
    """What it returns, or the error that it raised."""
    try:
        return function()
    except Exception as error:
        return error


def agreed(context: ParallelContext, found: Any) -> Any:
    """On rank 0 what was found; an error there is raised on every rank."""
    problem = [found if isinstance(found, Exception) else None]
    if context.world_size > 1:
        told = [f"{type(found).__name__}: {found}" if problem[0] else None]
        dist.broadcast_object_list(told, src=0, device=context.device)
        if told[0] is not None and context.get_global_rank():
            raise ParityError(f"on rank 0: {told[0]}", code="C100")
    if problem[0] is not None:
        raise problem[0]
    return found


def shared(context: ParallelContext, make: Callable[[], Any]) -> Any:
    """What rank 0 makes, on every rank."""
    found = [agreed(context, attempt(make) if context.get_global_rank() == 0 else None)]
    if context.world_size > 1:
        dist.broadcast_object_list(found, src=0, device=context.device)
    return found[0]

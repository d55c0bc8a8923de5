"""What all ranks must agree on before step 1: placements that add up, and equal weights where they are shared."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colonnade.comm.messages import message_device
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import PlacementError
from colonnade.parallel.demand import Holding, holding
from colonnade.parallel.dtensor import effective_placement, local_part
from colonnade.parallel.flat import FlatLayout
from colonnade.parallel.placement import Placement, logical_numel

_BROADCAST_BYTES = 32 << 20


@dataclass(frozen=True, eq=False)
class Held:
    """A tensor of the model with its placement and who else holds it."""

    name: str
    tensor: Tensor
    placement: Placement
    holding: Holding


def held_tensors(model: nn.Module, context: ParallelContext, buffers: bool = False) -> list[Held]:
    """Every parameter (and buffer) of the model, once, with its holders."""
    layout, rank = context.layout, context.get_global_rank()
    named = [*model.named_parameters(), *(model.named_buffers() if buffers else ())]
    known: dict[Placement, Holding] = {}
    found = []
    for name, tensor in named:
        placement = effective_placement(tensor, layout, rank)
        if placement not in known:
            known[placement] = holding(layout, placement, rank)
        found.append(Held(name, tensor, placement, known[placement]))
    return found


def check_placements(model: nn.Module, context: ParallelContext) -> None:
    """For every parameter: local elements / |H|, summed over the world, must be the whole's number of elements.

    Two small collectives over the world (the first finds the number of parameters of each stage). Every rank
    raises the same error, which names the parameter where this rank knows its name.
    """
    held = held_tensors(model, context)
    stage = context.get_local_rank(ParallelMode.PIPELINE)
    counts = _counts_by_stage(held, stage, context)
    totals = _sum_over_world(_contributions(held, counts, stage, context), context)
    problems = _problems(totals, counts, held, stage)
    if problems:
        raise PlacementError(
            "placements do not add up (the sum over ranks of local elements / number of holders must be the number "
            "of elements of the whole tensor):\n  " + "\n  ".join(problems[:12])
        )


def broadcast_shared(model: nn.Module, context: ParallelContext) -> None:
    """Make weights and buffers equal on all their holders: the first holder's. Collective over the world."""
    held = [entry for entry in held_tensors(model, context, buffers=True) if entry.holding.count > 1]
    batches: dict[tuple[tuple[int, ...], torch.dtype], list[Held]] = {}
    for entry in sorted(held, key=_tie_key):
        batches.setdefault((entry.holding.ranks, entry.tensor.dtype), []).append(entry)
    context.ensure_groups(ranks for ranks, _ in batches)
    with torch.no_grad():
        for (ranks, _), entries in batches.items():
            flat: Tensor | None = None
            for tensors in _batches([local_part(entry.tensor) for entry in entries]):
                flat = _broadcast(tensors, ranks, context, flat)


def _batches(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """In turn, so many that few messages are sent, and so few that they take little memory beside the model."""
    batch: list[Tensor] = []
    taken = 0
    for tensor in tensors:
        if batch and taken + tensor.nbytes > _BROADCAST_BYTES:
            yield batch
            batch, taken = [], 0
        batch.append(tensor)
        taken += tensor.nbytes
    if batch:
        yield batch


def _broadcast(
    tensors: Sequence[Tensor], ranks: tuple[int, ...], context: ParallelContext, used: Tensor | None
) -> Tensor:
    """By way of `used`, where that is large enough, else of new memory; returns it. The backend lets go of it late."""
    layout = FlatLayout(tensors)
    flat = used[: layout.numel] if used is not None and used.numel() >= layout.numel else layout.allocate()
    views = layout.views(flat)
    for view, tensor in zip(views, tensors, strict=True):
        view.copy_(tensor)
    dist.broadcast(flat, src=ranks[0], group=context.group_of_ranks(ranks))
    for view, tensor in zip(views, tensors, strict=True):
        tensor.copy_(view)
    return flat if used is None or used.numel() < flat.numel() else used


def _tie_key(entry: Held) -> str:
    return entry.placement.tied.key if entry.placement.tied is not None else ""


def _counts_by_stage(held: list[Held], stage: int, context: ParallelContext) -> list[int]:
    """How many parameters each stage has; refuses ranks of one stage whose parameters have other names."""
    stages = context.get_world_size(ParallelMode.PIPELINE)
    names = hashlib.sha256("\n".join(entry.name for entry in held).encode()).digest()
    digest = int.from_bytes(names[:8], "big") >> 2
    lowest = torch.full((stages, 4), torch.iinfo(torch.int64).max, dtype=torch.int64)
    lowest[stage] = torch.tensor([len(held), -len(held), digest, -digest])
    lowest = lowest.to(message_device(context.device))
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    table = lowest.tolist()
    for at, (least, most, low, high) in enumerate(table):
        if least != -most or low != -high:
            raise PlacementError(
                f"the ranks of pipeline stage {at} do not have the same parameters: between {least} and {-most} of them, "
                f"or other names. This rank (stage {stage}) has {len(held)}. Every rank of a stage builds the same modules."
            )
    return [row[0] for row in table]


def _contributions(held: list[Held], counts: list[int], stage: int, context: ParallelContext) -> Tensor:
    """Rows (elements / holders, expected / ranks that have it, expected squared / the same) of the whole model."""
    found = []
    sizes = {mode: context.get_world_size(mode) for mode in context.layout.modes if context.is_initialized(mode)}
    ranks_of_stage = context.world_size // len(counts)
    for entry in held:
        expected = logical_numel(entry.tensor, entry.placement, sizes)
        stages = len(entry.placement.tied.stages) if entry.placement.tied is not None else 1
        share = local_part(entry.tensor).numel() / entry.holding.count
        # A tied parameter has a row at each of its stages, so each row holds its part of the sum.
        found.append([share * stages, expected / ranks_of_stage, expected**2 / ranks_of_stage])
    rows = torch.zeros((sum(counts), 3), dtype=torch.float64)
    if found:
        rows[sum(counts[:stage]) :][: len(found)] = torch.tensor(found, dtype=torch.float64)
    return rows


def _sum_over_world(rows: Tensor, context: ParallelContext) -> list[list[float]]:
    rows = rows.to(message_device(context.device))
    dist.all_reduce(rows)
    return rows.tolist()


def _problems(totals: list[list[float]], counts: list[int], held: list[Held], stage: int) -> list[str]:
    start = sum(counts[:stage])
    problems = []
    for at, (found, expected, squares) in enumerate(totals):
        here = start <= at < start + counts[stage]
        name = held[at - start].name if here else f"a parameter of another stage (number {at})"
        placement = held[at - start].placement if here else "?"
        if abs(squares - expected**2) > 1e-6 * max(1.0, expected**2):
            problems.append(
                f"{name}: ranks expect wholes of different sizes ({placement}); give place(..., shape=<whole shape>) "
                f"where shards are uneven"
            )
        elif abs(found - expected) > 1e-6 * max(1.0, expected):
            problems.append(f"{name}: {found:g} elements found, {expected:g} expected; placed as {placement}")
    return problems

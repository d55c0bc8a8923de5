"""Gradients that did not go the usual way: missing on some rank, late, sparse, or without a bucket.

Whatever happened, the result equals one process on the joined batch: a parameter that got a gradient on any
rank has the sum, a parameter that got none anywhere has `.grad` None, so that the optimizer skips it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from colonnade.engine.gradient_handler._agreement import MISSING, OUTSIDE, SPARSE
from colonnade.engine.gradient_handler._bucket import Bucket, local
from colonnade.engine.gradient_handler._options import GroupReduction, SyncOptions
from colonnade.engine.gradient_handler._party import Party, all_gather_flat
from colonnade.engine.gradient_handler._reduction_state import Places, ReductionState
from colonnade.engine.gradient_handler._transport import LocalTask, collective_task


def settle(
    state: ReductionState, reports: Sequence[bytes], factor: float | Tensor, options: SyncOptions
) -> dict[int, list[int]]:
    """Finish the parameters that `reports` (all ranks' notes) remark on, after the buckets are reduced.

    Returns position -> global ranks that had no gradient while others did. Collective.
    """
    reduction, party, places = state.reduction, state.party, state.places
    dense: list[int] = []
    uneven: dict[int, list[int]] = {}
    for position, notes in enumerate(zip(*reports, strict=True)):
        if not any(note & (MISSING | OUTSIDE | SPARSE) for note in notes):
            continue
        in_bucket = position in places and not all(note & (MISSING | SPARSE) for note in notes)
        outside = any(note & OUTSIDE for note in notes)
        sparse = any(note & SPARSE for note in notes)
        if outside or (sparse and in_bucket):
            dense.append(position)
        elif sparse:
            _sum_sparse(reduction, position, party, factor)
        elif in_bucket:
            bucket, index = places[position]
            bucket.attach(index)
        if in_bucket or outside or sparse:
            uneven[position] = [r for r, note in zip(party.ranks, notes, strict=True) if note & MISSING]
    _sum_dense(reduction, dense, party, places, factor, options)
    return {position: ranks for position, ranks in uneven.items() if ranks}


def _sum_dense(
    reduction: GroupReduction,
    positions: Sequence[int],
    party: Party,
    places: Places,
    factor: float | Tensor,
    options: SyncOptions,
) -> None:
    """Reduce what lies beside the buckets, and add it to what is in them."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for position in positions:
        tensor = local(reduction.parameters[position])
        kinds.setdefault((tensor.dtype, tensor.device), []).append(position)
    for kind in sorted(kinds, key=str):
        extra = Bucket(reduction, kinds[kind])
        extra.place(torch.zeros(extra.numel, dtype=kind[0], device=kind[1]))
        for i, position in enumerate(extra.positions):
            grad = extra.parameters[i].grad
            beside = grad is not None and not _is_in_bucket(grad, places.get(position))
            if grad is not None and beside:
                strided = grad if grad.layout is torch.strided else grad.to_dense()
                extra.views[i].copy_(local(strided, extra.parameters[i]))
        plain = replace(options, compress=None)
        task = collective_task(extra, party, plain) if party.size > 1 else LocalTask(extra)
        task.start()
        task.finish(factor)
        for i, position in enumerate(extra.positions):
            _put(extra, i, places.get(position))


def _is_in_bucket(grad: Tensor, place: tuple[Bucket, int] | None) -> bool:
    return place is not None and grad is place[0].grads[place[1]]


def _put(extra: Bucket, i: int, place: tuple[Bucket, int] | None) -> None:
    if place is None:
        extra.attach(i)
        return
    bucket, index = place
    bucket.views[index].add_(extra.views[i])
    bucket.attach(index)


def _sum_sparse(reduction: GroupReduction, position: int, party: Party, factor: float | Tensor) -> None:
    """Sum sparse gradients as what they are: all ranks' entries, gathered, then those of equal index added."""
    parameter = reduction.parameters[position]
    own = _coo(parameter)
    counts = [int(count) for count in party.gather_objects(own._nnz())]
    indices = _gather_padded(own.indices().t().contiguous(), counts, party).t()
    values = _gather_padded(own.values(), counts, party)
    total = torch.sparse_coo_tensor(indices, values, parameter.shape).coalesce()
    total.values().mul_(factor)
    parameter.grad = total


def _coo(parameter: Tensor) -> Tensor:
    """The parameter's sparse gradient, its equal indices added up; without entries where there is none."""
    grad = parameter.grad
    if grad is not None:
        return grad.coalesce()
    dims = 1
    indices = torch.empty(dims, 0, dtype=torch.int64, device=parameter.device)
    values = torch.empty(0, *parameter.shape[dims:], dtype=parameter.dtype, device=parameter.device)
    return torch.sparse_coo_tensor(indices, values, parameter.shape).coalesce()


def _gather_padded(rows: Tensor, counts: Sequence[int], party: Party) -> Tensor:
    """The rows of all ranks, in party order."""
    if party.size == 1:
        return rows
    most = max(counts)
    padded = rows.new_zeros(most, *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    gathered = rows.new_empty(party.size * most, *rows.shape[1:])
    if most:
        all_gather_flat(gathered, padded, group=party.group)
    blocks = gathered.view(party.size, most, *rows.shape[1:])
    return torch.cat([block[:count] for block, count in zip(blocks, counts, strict=True)])

"""Gradients that did not go the usual way: missing on some rank, late, sparse, or without a bucket.

Every rank writes one note per parameter. Nearly always all notes are alike, and a digest shows it; only where they
differ are the notes themselves exchanged. Whatever happened, the result equals one process on the joined batch: a
parameter that got a gradient on any rank has the sum, a parameter that got none anywhere has `.grad` None, so that
the optimizer skips it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from struct import Struct

import torch
from torch import Tensor

from colonnade.comm.memory import Memory
from colonnade.comm.rank_group import RankGroup
from colonnade.comm.torch_versions import all_gather_flat
from colonnade.errors import GradientError, listed
from colonnade.parallel.dtensor import local_part
from colonnade.parallel.flat import flattened
from colonnade.reduce.bucket import FAILED, MISSING, OUTSIDE, SPARSE, Bucket
from colonnade.reduce.buffer import Buffer
from colonnade.reduce.options import HALVES
from colonnade.reduce.records import Sum
from colonnade.reduce.sum_state import Places, SumState
from colonnade.reduce.transports.collective import Collective
from colonnade.reduce.transports.local import Local

USE_ONE_FORM = (
    "use one form. A mean that cross-entropy has made counts as (sum, count): times 1.0 it is a plain mean, and where "
    "there is nothing to learn from give (0 * output.sum(), 0)"
)
_STEP = Struct("<q")
_NO_STEP = 1 << 48
"""The number of a step is below, the bits of a count above: ranks that gave means meet counts at the place of steps."""


class GroupNotes:
    """The notes of one group of ranks, for all its sums one after another."""

    def __init__(self, group: RankGroup, states: Sequence[SumState]) -> None:
        self.group, self.states = group, list(states)
        self._own: list[bytes] = []
        self._counts = b""
        self._reports: list[list[bytes]] | None = None

    def announce(self, step: int, counts: bool = False) -> None:
        """Tell the others; does not wait. `counts`: this rank's loss of the step was given as (sum, count)."""
        self._own, self._reports = [state.close_notes() for state in self.states], None
        self._counts = bytes([counts])
        digest = hashlib.blake2b(b"".join(self._own) + self._counts, digest_size=8).digest()
        self.group.signal(_STEP.pack(step) + digest)

    def resolve(self) -> list[list[bytes]]:
        """Wait for the others: per sum, the notes of every rank in group order."""
        if self._reports is None:
            heard = self.group.collect()
            self._check_steps(heard)
            own = b"".join(self._own) + self._counts
            whole = [own] * self.group.size if len({*heard}) == 1 else self.group.gather_bytes(own)
            self._reports, start = [], 0
            for notes in self._own:
                self._reports.append([other[start : start + len(notes)] for other in whole])
                start += len(notes)
            self._check_forms([other[-1] for other in whole])
        return self._reports

    def _check_forms(self, counts: list[int]) -> None:
        """Where some ranks sum counts and others do not, the gradients have no common factor."""
        failed = any(notes and notes[0] & FAILED for reports in self._reports or () for notes in reports)
        if failed or len({*counts}) == 1:
            return
        told = [[rank for rank, one in zip(self.group.ranks, counts, strict=True) if one == form] for form in (0, 1)]
        raise GradientError(
            f"the loss is not of one form on all ranks: a mean on rank {listed(told[0])}; (sum, count) on rank "
            f"{listed(told[1])}; {USE_ONE_FORM}",
            code="C045",
        )

    def _check_steps(self, heard: list[bytes]) -> None:
        steps = [step for (step,) in map(_STEP.unpack_from, heard)]
        counting = [rank for rank, step in zip(self.group.ranks, steps, strict=True) if step > _NO_STEP]
        if counting:
            raise GradientError(
                f"rank {listed(counting)} adds up the counts of its losses, given as (sum, count), and rank "
                f"{listed(set(self.group.ranks).difference(counting))} gave a mean; {USE_ONE_FORM}",
                code="C045",
            )
        if len({*steps}) > 1:
            at = ", ".join(f"rank {rank}: {step}" for rank, step in zip(self.group.ranks, steps, strict=True))
            raise GradientError(
                f"ranks are not in the same gradient synchronisation ({at}); a rank has skipped or repeated one",
                code="C043",
            )


def notes_of_all(
    groups: Sequence[GroupNotes], step: int, meanwhile: Callable[[], None] = lambda: None, *, counts: bool = False
) -> list[tuple[SumState, list[bytes]]]:
    """Every sum with the notes of all its ranks. Collective over each group; `meanwhile` is done before waiting."""
    for notes in groups:
        notes.announce(step, counts)
    meanwhile()
    return [pair for notes in groups for pair in zip(notes.states, notes.resolve(), strict=True)]


def finish_uneven(state: SumState, reports: Sequence[bytes], factor: float | Tensor) -> dict[int, list[int]]:
    """Finish the parameters that `reports` (all ranks' notes) remark on, after the buckets are summed.

    Returns position -> global ranks that had no gradient while others did. Collective.
    """
    sum_, group, places = state.sum, state.group, state.places
    dense: list[int] = []
    absent: dict[int, set[int]] = {}
    uneven: dict[int, list[int]] = {}
    for position, notes in enumerate(zip(*reports, strict=True)):
        if not any(note & (MISSING | OUTSIDE | SPARSE) for note in notes):
            continue
        in_bucket = position in places and not all(note & (MISSING | SPARSE) for note in notes)
        outside = any(note & OUTSIDE for note in notes)
        sparse = any(note & SPARSE for note in notes)
        if sparse and sum_.sharding is not None:
            raise GradientError(
                f"the gradient of {sum_.names[position]!r} is sparse, and ZeRO shards dense gradients only; build its "
                f"layer with sparse=False, or turn zero off"
            )
        if outside or (sparse and in_bucket):
            dense.append(position)
        elif sparse:
            _sum_sparse(sum_, position, group, factor)
        elif in_bucket:
            bucket, index = places[position]
            if not bucket.is_sharded:
                bucket.attach(index)
        elif position in places:
            bucket, index = places[position]
            absent.setdefault(id(bucket), set()).add(index)
        if in_bucket or outside or sparse:
            uneven[position] = [r for r, note in zip(group.ranks, notes, strict=True) if note & MISSING]
    for bucket in state.buckets:
        bucket.absent = frozenset(absent.get(id(bucket), ()))
    _sum_dense(sum_, dense, group, places, factor)
    return {position: ranks for position, ranks in uneven.items() if ranks}


def explain(sum_: Sum, position: int, ranks: Sequence[int], step: int) -> str:
    """What to say of a parameter without gradient on some ranks."""
    return (
        f"step {step}: no gradient for {sum_.names[position]!r} on ranks {listed(ranks)}, "
        f"but on others of {listed(sum_.ranks)}: counted as zero (said once)"
    )


def _sum_dense(sum_: Sum, positions: Sequence[int], group: RankGroup, places: Places, factor: float | Tensor) -> None:
    """Sum what lies beside the buckets, and add it to what is in them."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for position in positions:
        tensor = local_part(sum_.parameters[position])
        kinds.setdefault((tensor.dtype, tensor.device), []).append(position)
    wide = None if sum_.options.reduce_dtype in HALVES else sum_.options.reduce_dtype
    plain = replace(sum_, sharding=None, options=replace(sum_.options, compress=None, reduce_dtype=wide))
    for dtype, device in sorted(kinds, key=str):
        extra = Bucket(plain, kinds[dtype, device], group.index)
        memory = Memory(torch.zeros(extra.numel, dtype=dtype, device=device))
        buffer = Buffer(extra, memory)
        for parameter, view, position in zip(extra.parameters, buffer.views, extra.positions, strict=True):
            grad = parameter.grad
            if grad is not None and not _is_in_bucket(grad, places.get(position)):
                strided = grad if grad.layout is torch.strided else grad.to_dense()
                view.copy_(local_part(strided, parameter))
        transport = (Local if group.alone else Collective)(extra, memory, group)
        transport.start()
        transport.finish(factor)
        for i, position in enumerate(extra.positions):
            _put(extra.parameters[i], buffer, i, places.get(position))


def _is_in_bucket(grad: Tensor, place: tuple[Bucket, int] | None) -> bool:
    if place is None:
        return False
    bucket, index = place
    return grad is bucket.grads[index]


def _put(parameter: Tensor, buffer: Buffer, i: int, place: tuple[Bucket, int] | None) -> None:
    if place is None:
        parameter.grad = buffer.grads[i]
        return
    bucket, index = place
    if not bucket.is_sharded:
        bucket.views[index].add_(buffer.views[i])
        bucket.attach(index)
        return
    parameter.grad = None
    flat = flattened(buffer.views[i])
    for span in bucket.spans:
        if span.index == index:
            into = bucket.gradient[span.at : span.at + span.numel]
            into.add_(flat[span.start : span.stop].to(into.device, into.dtype))


def _sum_sparse(sum_: Sum, position: int, group: RankGroup, factor: float | Tensor) -> None:
    """Sum sparse gradients as what they are: all ranks' entries, gathered, then those of equal index added."""
    parameter = sum_.parameters[position]
    own = _coo(parameter)
    counts = [int(count) for count in group.gather_objects(own._nnz())]
    indices = _gather_padded(own.indices().t().contiguous(), counts, group).t()
    values = _gather_padded(own.values(), counts, group)
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


def _gather_padded(rows: Tensor, counts: Sequence[int], group: RankGroup) -> Tensor:
    """The rows of all ranks, in group order."""
    if group.alone:
        return rows
    most = max(counts)
    padded = rows.new_zeros(most, *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    gathered = rows.new_empty(group.size * most, *rows.shape[1:])
    if most:
        all_gather_flat(gathered, padded, group=group.group)
    blocks = gathered.view(group.size, most, *rows.shape[1:])
    return torch.cat([block[:count] for block, count in zip(blocks, counts, strict=True)])

"""Collectives on plain tensors over one group, without autograd, for gloo and NCCL.

These functions handle the cases that backends do not: non-contiguous tensors (gloo silently corrupts them), uneven shards, and
functions that were renamed between torch versions. Every call can be recorded (`recorded`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.comm.torch_versions import all_gather_flat, gather_rows, reduce_scatter_flat
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode, mode_of


@dataclass(frozen=True)
class Members:
    """The group of a mode that this rank is in; `at` is this rank's index in the group."""

    mode: ParallelMode
    group: Any
    ranks: tuple[int, ...]
    at: int

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class Call:
    """A recorded call: the operation, the mode, and the bytes that each rank received from the others."""

    op: str
    mode: ParallelMode
    received: int


_recorders: list[list[Call]] = []


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """Inside the block, record the collectives of this process, including those of backward passes, in the list that the block
    gets.

    `Call.received` has the bytes that a bandwidth-optimal algorithm receives: for an all-reduce of n bytes over p ranks
    2n(p-1)/p; for an all-gather, reduce-scatter or all-to-all the shards of the other p-1 ranks; for a broadcast, or a reduce to
    one rank, n(p-1)/p on average.
    """
    calls: list[Call] = []
    _recorders.append(calls)
    try:
        yield calls
    finally:
        # By identity: lists of nested blocks may be equal.
        _recorders[:] = [known for known in _recorders if known is not calls]


def members_of(mode: ParallelMode, context: ParallelContext) -> Members | None:
    """This rank's group of `mode`; None if it has no group or is the only rank in it."""
    mode = mode_of(mode)
    if not context.is_initialized(mode):
        return None
    ranks = context.get_ranks_in_group(mode)
    if len(ranks) == 1:
        return None
    return Members(mode, context.get_group(mode), tuple(ranks), context.get_local_rank(mode))


def all_reduce(x: Tensor, members: Members, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """All-reduce into a new tensor; the reduction is a sum by default, or `op`."""
    total = x.clone(memory_format=torch.contiguous_format)
    _note("all_reduce", members, 2 * _bytes(x) * (members.size - 1) // members.size)
    dist.all_reduce(total, op, group=members.group)
    return total


def begin_all_reduce(x: Tensor, members: Members) -> Callable[[], Tensor]:
    """Start an all-reduce, in place if x is contiguous. Returns a function that waits for the sum and returns it."""
    total = x.contiguous()
    _note("all_reduce", members, 2 * _bytes(x) * (members.size - 1) // members.size)
    work = dist.all_reduce(total, group=members.group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return total

    return wait


def all_gather(x: Tensor, members: Members, dim: int, sizes: Sequence[int]) -> Tensor:
    """The shards of all ranks, concatenated along `dim`; `sizes` are their lengths."""
    longest = max(sizes)
    own = _padded(x, dim, longest).contiguous()
    _note("all_gather", members, (sum(sizes) - sizes[members.at]) * _bytes_per_slice(x, dim))
    gathered = own.new_empty((members.size, *own.shape))
    all_gather_flat(gathered.view(-1), own.view(-1), group=members.group)
    # Even shards along the outermost dimension are in place already.
    if min(sizes) == longest and x.shape[:dim].numel() == 1:
        return gathered.view(*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :])
    return torch.cat([part.narrow(dim, 0, size) for part, size in zip(gathered, sizes, strict=True)], dim)


def reduce_scatter(x: Tensor, members: Members, dim: int, sizes: Sequence[int]) -> Tensor:
    """This rank's shard along `dim` of the sum over all ranks."""
    return begin_reduce_scatter(x, members, dim, sizes, async_op=False)()


def begin_reduce_scatter(
    x: Tensor, members: Members, dim: int, sizes: Sequence[int], async_op: bool = True
) -> Callable[[], Tensor]:
    """Start a reduce-scatter. Returns a function that waits for the result and returns it.

    Compiled code must pass async_op=False, because it cannot hold `Work` objects."""
    longest, length = max(sizes), sizes[members.at]
    _note("reduce_scatter", members, (members.size - 1) * length * _bytes_per_slice(x, dim))
    parts = [_padded(part, dim, longest) for part in x.split(list(sizes), dim)]
    in_order = min(sizes) == longest and x.shape[:dim].numel() == 1
    first, *_ = parts
    total = torch.empty_like(first, memory_format=torch.contiguous_format)
    stacked = x if in_order else torch.cat(parts)
    work = reduce_scatter_flat(total.view(-1), stacked.reshape(-1), group=members.group, async_op=async_op)

    def wait() -> Tensor:
        if work is not None:
            work.wait()
        return total if length == longest else total.narrow(dim, 0, length).contiguous()

    return wait


def own_part(x: Tensor, members: Members, dim: int, sizes: Sequence[int]) -> Tensor:
    """This rank's shard of x along `dim`; nothing is sent."""
    return x.narrow(dim, sum(sizes[: members.at]), sizes[members.at]).contiguous()


def all_to_all(x: Tensor, members: Members, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """All-to-all: send the rows sorted by destination, return the received rows by origin."""
    arrived = x.new_empty((sum(receive), *x.shape[1:]))
    _note("all_to_all", members, (sum(receive) - receive[members.at]) * _bytes_per_slice(x, 0))
    dist.all_to_all_single(arrived, x.contiguous(), list(receive), list(send), group=members.group)
    return arrived


def ring(x: Tensor, members: Members, shift: int, shape: Sequence[int]) -> Tensor:
    """Send x `shift` ranks ahead in the group; return the tensor received from `shift` ranks behind, which has the shape
    `shape`."""
    arrived = x.new_empty(tuple(shape))
    _note("ring", members, _bytes(arrived))
    onward = members.ranks[(members.at + shift) % members.size]
    origin = members.ranks[(members.at - shift) % members.size]
    return Swap(x.contiguous(), arrived, onward, origin, members.group).wait()


class Swap:
    """An asynchronous send to one rank and receive from another; `wait` returns the received tensor."""

    def __init__(
        self, sent: Tensor, arriving: Tensor, onward: int, origin: int, group: dist.ProcessGroup | None
    ) -> None:
        self._arriving = arriving
        # Gloo sends host memory only.
        by_host = arriving.is_cuda and backends_of(group).get("cuda") == "gloo"
        # The attribute keeps the tensor alive until it is sent.
        self._sent, self._landing = (
            (sent.cpu(), torch.empty_like(arriving, device="cpu")) if by_host else (sent, arriving)
        )
        moves = [(dist.isend, self._sent, onward), (dist.irecv, self._landing, origin)]
        self._works = dist.batch_isend_irecv([dist.P2POp(move, tensor, peer, group) for move, tensor, peer in moves])

    def wait(self) -> Tensor:
        """Wait for the send and the receive, and return the received tensor."""
        for work in self._works:
            work.wait()
        return self._arriving if self._landing is self._arriving else self._arriving.copy_(self._landing)


def backends_of(group: dist.ProcessGroup | None) -> dict[str, str]:
    """The backend of the group for each kind of device: {"cpu": "gloo", "cuda": "nccl"}."""
    return dict(part.split(":") for part in dist.get_backend_config(group).split(","))


def broadcast(x: Tensor, members: Members, source: int, shape: Sequence[int]) -> Tensor:
    """Broadcast the tensor of the member at index `source`, and return it; `shape` is its shape, for the other members."""
    _note("broadcast", members, _bytes(x) * (members.size - 1) // members.size)
    sent = x.contiguous() if members.at == source else x.new_empty(tuple(shape))
    dist.broadcast(sent, members.ranks[source], group=members.group)
    return sent


def reduce_to(x: Tensor, members: Members, target: int) -> Tensor:
    """Sum x to the member at index `target`, and return the sum there; undefined on the other ranks.

    Overwrites x if x is contiguous.
    """
    _note("reduce", members, _bytes(x) * (members.size - 1) // members.size)
    total = x.contiguous()
    dist.reduce(total, members.ranks[target], group=members.group)
    return total


def numbers_of_all(numbers: Sequence[int], members: Members, device: torch.device) -> list[list[int]]:
    """All-gather the integers of every member. The host waits for the result."""
    rows = gather_rows(torch.tensor(list(numbers), dtype=torch.int64, device=device), members.group)
    # In a job estimate tensors have no values: all ranks are assumed to have the same numbers.
    if dist.get_backend(members.group) == "fake":
        return [list(numbers)] * members.size
    return rows.tolist()


def _padded(x: Tensor, dim: int, length: int) -> Tensor:
    missing = length - x.shape[dim]
    if missing == 0:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim)


def _note(op: str, members: Members, received: int) -> None:
    for calls in _recorders:
        calls.append(Call(op, members.mode, received))


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _bytes_per_slice(x: Tensor, dim: int) -> int:
    return x.shape[:dim].numel() * x.shape[dim + 1 :].numel() * x.element_size()

"""The wire under the collectives: plain tensors in and out over one group, without gradients, on gloo and NCCL.

Every call goes through a function of this file, which takes care of what the backends do not: non-contiguous
tensors (gloo corrupts them in silence), uneven parts, old and new names. Each call can be recorded.
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
    """The ranks that take part in a call: this rank's group of a mode."""

    mode: ParallelMode
    group: Any
    ranks: tuple[int, ...]
    at: int

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class Call:
    """A call that was made: its operation, its mode, and the bytes that each rank received from the others."""

    op: str
    mode: ParallelMode
    received: int


_recorders: list[list[Call]] = []


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """The list of the calls that this process makes inside the block, backward passes included.

    `received` is what a bandwidth-optimal algorithm brings to one rank: for an all-reduce of n bytes over p
    ranks 2n(p-1)/p, for the others (p-1) parts, for a broadcast or a reduction to one rank n(p-1)/p on average.
    """
    calls: list[Call] = []
    _recorders.append(calls)
    try:
        yield calls
    finally:
        # By identity: two lists of equal calls are equal.
        _recorders[:] = [known for known in _recorders if known is not calls]


def members_of(mode: ParallelMode, context: ParallelContext) -> Members | None:
    """This rank's group of `mode`, or None where there is nobody to talk to."""
    mode = mode_of(mode)
    if not context.is_initialized(mode):
        return None
    ranks = context.get_ranks_in_group(mode)
    if len(ranks) == 1:
        return None
    return Members(mode, context.get_group(mode), tuple(ranks), context.get_local_rank(mode))


def all_reduce(x: Tensor, members: Members, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """The sum of everybody's tensor, or what `op` makes of them instead."""
    total = x.clone(memory_format=torch.contiguous_format)
    _note("all_reduce", members, 2 * _bytes(x) * (members.size - 1) // members.size)
    dist.all_reduce(total, op, group=members.group)
    return total


def begin_all_reduce(x: Tensor, members: Members) -> Callable[[], Tensor]:
    """`all_reduce` in the memory of x, where that is contiguous, begun; the result waits for it."""
    total = x.contiguous()
    _note("all_reduce", members, 2 * _bytes(x) * (members.size - 1) // members.size)
    work = dist.all_reduce(total, group=members.group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return total

    return wait


def all_gather(x: Tensor, members: Members, dim: int, sizes: Sequence[int]) -> Tensor:
    """Everybody's part, one after another along `dim`; `sizes` are the parts' lengths."""
    longest = max(sizes)
    mine = _padded(x, dim, longest).contiguous()
    _note("all_gather", members, (sum(sizes) - sizes[members.at]) * _bytes_per_slice(x, dim))
    gathered = mine.new_empty((members.size, *mine.shape))
    all_gather_flat(gathered.view(-1), mine.view(-1), group=members.group)
    if min(sizes) == longest and x.shape[:dim].numel() == 1:
        return gathered.view(*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :])
    return torch.cat([part.narrow(dim, 0, size) for part, size in zip(gathered, sizes, strict=True)], dim)


def reduce_scatter(x: Tensor, members: Members, dim: int, sizes: Sequence[int]) -> Tensor:
    """This rank's part along `dim` of the sum of everybody's tensor."""
    return begin_reduce_scatter(x, members, dim, sizes, async_op=False)()


def begin_reduce_scatter(
    x: Tensor, members: Members, dim: int, sizes: Sequence[int], async_op: bool = True
) -> Callable[[], Tensor]:
    """`reduce_scatter`, begun; the result waits for it. Compiled code knows no works: there it is no `async_op`."""
    longest, mine = max(sizes), sizes[members.at]
    _note("reduce_scatter", members, (members.size - 1) * mine * _bytes_per_slice(x, dim))
    parts = [_padded(part, dim, longest) for part in x.split(list(sizes), dim)]
    in_order = min(sizes) == longest and x.shape[:dim].numel() == 1
    first, *_ = parts
    total = torch.empty_like(first, memory_format=torch.contiguous_format)
    stacked = x if in_order else torch.cat(parts)
    work = reduce_scatter_flat(total.view(-1), stacked.reshape(-1), group=members.group, async_op=async_op)

    def wait() -> Tensor:
        if work is not None:
            work.wait()
        return total if mine == longest else total.narrow(dim, 0, mine).contiguous()

    return wait


def own_part(x: Tensor, members: Members, dim: int, sizes: Sequence[int]) -> Tensor:
    """This rank's part of x along `dim`; nothing is sent."""
    return x.narrow(dim, sum(sizes[: members.at]), sizes[members.at]).contiguous()


def all_to_all(x: Tensor, members: Members, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """Rows by destination out, rows by origin in."""
    arrived = x.new_empty((sum(receive), *x.shape[1:]))
    _note("all_to_all", members, (sum(receive) - receive[members.at]) * _bytes_per_slice(x, 0))
    dist.all_to_all_single(arrived, x.contiguous(), list(receive), list(send), group=members.group)
    return arrived


def ring(x: Tensor, members: Members, shift: int, shape: Sequence[int]) -> Tensor:
    """The tensor, of `shape`, of the rank `shift` places before this one; mine goes as far ahead."""
    arrived = x.new_empty(tuple(shape))
    _note("ring", members, _bytes(arrived))
    onward = members.ranks[(members.at + shift) % members.size]
    origin = members.ranks[(members.at - shift) % members.size]
    return Swap(x.contiguous(), arrived, onward, origin, members.group).wait()


class Swap:
    """A tensor on its way to one rank while another comes from one; `wait` gives the one that came."""

    def __init__(
        self, sent: Tensor, arriving: Tensor, onward: int, origin: int, group: dist.ProcessGroup | None
    ) -> None:
        self._arriving = arriving
        # Gloo sends from the memory of the host alone.
        by_host = arriving.is_cuda and backends_of(group).get("cuda") == "gloo"
        # Kept until it has gone.
        self._sent, self._landing = (
            (sent.cpu(), torch.empty_like(arriving, device="cpu")) if by_host else (sent, arriving)
        )
        moves = [(dist.isend, self._sent, onward), (dist.irecv, self._landing, origin)]
        self._works = dist.batch_isend_irecv([dist.P2POp(move, tensor, peer, group) for move, tensor, peer in moves])

    def wait(self) -> Tensor:
        """The tensor that came."""
        for work in self._works:
            work.wait()
        return self._arriving if self._landing is self._arriving else self._arriving.copy_(self._landing)


def backends_of(group: dist.ProcessGroup | None) -> dict[str, str]:
    """Which backend of the group moves which kind of memory: {"cpu": "gloo", "cuda": "nccl"}."""
    return dict(part.split(":") for part in dist.get_backend_config(group).split(","))


def broadcast(x: Tensor, members: Members, source: int, shape: Sequence[int]) -> Tensor:
    """The tensor of the member at `source`, on all of them; it has this shape."""
    _note("broadcast", members, _bytes(x) * (members.size - 1) // members.size)
    sent = x.contiguous() if members.at == source else x.new_empty(tuple(shape))
    dist.broadcast(sent, members.ranks[source], group=members.group)
    return sent


def reduce_to(x: Tensor, members: Members, target: int) -> Tensor:
    """The sum of everybody's tensor, on the member at `target`; elsewhere nothing of use. Uses x up."""
    _note("reduce", members, _bytes(x) * (members.size - 1) // members.size)
    total = x.contiguous()
    dist.reduce(total, members.ranks[target], group=members.group)
    return total


def numbers_of_all(numbers: Sequence[int], members: Members, device: torch.device) -> list[list[int]]:
    """The integers of every member; the host waits for them."""
    everyone = gather_rows(torch.tensor(list(numbers), dtype=torch.int64, device=device), members.group)
    # A plan, on tensors without values: the others are taken to say the same.
    if dist.get_backend(members.group) == "fake":
        return [list(numbers)] * members.size
    return everyone.tolist()


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

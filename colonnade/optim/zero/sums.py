"""Sums that land in slices: how the gradients of a bucket get from every rank to the rank that owns each slice."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.optim.zero.bucket import ShardedBucket
from colonnade.optim.zero.team import Flat, reduce_scatter_flat

_CACHE_BYTES = 512 << 10
"""What the pieces of all ranks together may take of the cache."""


class SliceSum(Protocol):
    """`start` when a room is full, `land` to have factor x the sum in `into`; each once per use of the room.

    `prompt` says that the rooms are ready as soon as all ranks have met, and `start` and `land` talk to nobody.
    """

    prompt: bool

    def start(self) -> None: ...

    def land(self, into: Tensor, factor: float, add: bool) -> None: ...


def slice_sum(bucket: ShardedBucket, room: Flat, prompt: bool) -> SliceSum:
    """What sums this bucket in this room; `prompt` where its rooms are never used twice between two meetings."""
    team = bucket.team
    if team.alone:
        return LocalSum(bucket, room.own)
    if room.every is not None:
        return SharedSum(bucket, room.every, prompt)
    travel, dtype = team.travel, bucket.dtype
    if travel.fixed_order or travel.sum_dtype(dtype) != dtype or travel.wire_dtype(dtype) != dtype:
        return OrderedSum(bucket, room.own)
    return ScatterSum(bucket, room.own)


class LocalSum:
    """A bucket that no other rank shares."""

    prompt = True

    def __init__(self, bucket: ShardedBucket, room: Tensor) -> None:
        self._mine = room[bucket.own][: bucket.used]

    def start(self) -> None:
        """Nothing to send."""

    def land(self, into: Tensor, factor: float, add: bool) -> None:
        _put(self._mine, into, factor, add)


class SharedSum:
    """Rooms that every rank sees: each sums its slice over all of them, in rank order, while it is in the cache."""

    def __init__(self, bucket: ShardedBucket, rooms: list[Tensor], prompt: bool) -> None:
        self.prompt = prompt
        self._team = bucket.team
        self._sum_dtype = _widest(bucket)
        slices = [room[bucket.own][: bucket.used] for room in rooms]
        step = max(4096, _CACHE_BYTES // (len(rooms) * bucket.dtype.itemsize))
        self._spans = [slice(start, min(start + step, bucket.used)) for start in range(0, bucket.used, step)]
        self._pieces = [[part[span] for part in slices] for span in self._spans]

    def start(self) -> None:
        """Tell the others that this room is full."""
        if not self.prompt:
            self._team.party.signal(b"f")

    def land(self, into: Tensor, factor: float, add: bool) -> None:
        """Wait for the others' rooms, and read this rank's slice of them."""
        if not self.prompt:
            self._team.party.collect()
        for span, parts in zip(self._spans, self._pieces, strict=True):
            _put(self._total(parts), into[span], factor, add)

    def _total(self, parts: list[Tensor]) -> Tensor:
        first, second, *others = parts
        if first.dtype != self._sum_dtype:
            total = first.to(self._sum_dtype).add_(second)
        else:
            total = first + second
        for other in others:
            total.add_(other)
        return total


class ScatterSum:
    """One reduce-scatter in the bucket's own dtype."""

    prompt = False

    def __init__(self, bucket: ShardedBucket, room: Tensor) -> None:
        self._bucket, self._room = bucket, room
        self._work: Any = None
        self._out = torch.empty(0)

    def start(self) -> None:
        self._out = self._room.new_empty(self._bucket.width)
        self._work = reduce_scatter_flat(self._out, self._room, group=self._bucket.team.group, async_op=True)

    def land(self, into: Tensor, factor: float, add: bool) -> None:
        self._work.wait()
        _put(self._out[: self._bucket.used], into, factor, add)
        self._work, self._out = None, torch.empty(0)  # the work holds on to its tensors too


class OrderedSum:
    """Every rank sends each slice to its owner, who adds them in rank order and in a wider dtype.

    Moves as many bytes as a reduce-scatter, in the `wire` dtype.
    """

    prompt = False

    def __init__(self, bucket: ShardedBucket, room: Tensor) -> None:
        self._team, self._used, self._room = bucket.team, bucket.used, room
        self._wire = bucket.team.travel.wire_dtype(bucket.dtype)
        self._sum_dtype = _widest(bucket)
        self._work: Any = None
        self._sent = self._received = torch.empty(0)

    def start(self) -> None:
        self._sent = self._room.to(self._wire)
        self._received = torch.empty_like(self._sent)
        self._work = dist.all_to_all_single(self._received, self._sent, group=self._team.group, async_op=True)

    def land(self, into: Tensor, factor: float, add: bool) -> None:
        self._work.wait()
        first, *others = self._received.view(self._team.size, -1)[:, : self._used]
        total = first.to(self._sum_dtype, copy=True)
        for other in others:
            total.add_(other)
        self._work, self._sent, self._received = None, torch.empty(0), torch.empty(0)
        _put(total, into, factor, add)


def _widest(bucket: ShardedBucket) -> torch.dtype:
    """What a sum by hand is taken in: costs nothing where the slice's gradients are wider than what is sent."""
    wanted = bucket.team.travel.sum_dtype(bucket.dtype)
    return max(wanted, bucket.grads.dtype, key=lambda dtype: dtype.itemsize) if bucket.used else wanted


def _put(total: Tensor, into: Tensor, factor: float, add: bool) -> None:
    """factor x total into (or on top of) `into`, which may lie elsewhere and in another dtype."""
    if add:
        into.add_(total.to(into.device, into.dtype), alpha=factor)
    elif total.device == into.device and total.dtype == into.dtype:
        torch.mul(total, factor, out=into)
    else:
        into.copy_(total)
        into.mul_(factor)

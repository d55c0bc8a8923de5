"""Storage: the memory in which the buckets of one sum lie, those of one dtype on one device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import torch

from colonnade.comm.memory import Memory, allocate
from colonnade.comm.rank_group import RankGroup
from colonnade.parallel.dtensor import local_part
from colonnade.reduce.bucket import Bucket
from colonnade.reduce.buffer import Buffer, GradientShard
from colonnade.reduce.options import HALVES
from colonnade.reduce.records import Sum
from colonnade.reduce.transports import TRANSPORTS, Transport

_MB = 1 << 20
TURNS = 2
"""In how many pieces of memory buckets take turns that have none of their own: one is summed while the next is filled."""


class BucketStorage:
    """Owns one allocation in which all its buckets lie, or a few in which they take turns."""

    def __init__(self, sum_: Sum, group: RankGroup, dtype: torch.dtype, device: torch.device) -> None:
        self._sum, self._group = sum_, group
        self._dtype, self._device = dtype, device
        self._memory: list[Memory] = []
        # One for all memory of the group: a signal says that one bucket is full, so no two may be waited for at once.
        self._under_way: deque[Bucket] = group.under_way
        self._turn = 0

    def lay_out(self, order: Sequence[int]) -> list[Bucket]:
        """Buckets for the parameters at these positions, in this order, with their memory and transport.

        Collective where the memory must grow; the same order on every rank.
        """
        options, transport = self._sum.options, self._transport(shared=True)
        sizes = [local_part(self._sum.parameters[position]).nbytes for position in order]
        cap, first = transport.sizes(sum(sizes) / _MB, self._group.size)
        cap, first = options.bucket_mb or cap, options.first_bucket_mb or first
        buckets = fill(self._sum, order, cap * _MB, first * _MB, self._group.index)
        keeps = all(bucket.keeps_gradients for bucket in buckets)
        self._reserve(*((1, sum(b.numel for b in buckets)) if keeps else (TURNS, max(b.numel for b in buckets))))
        transport = self._transport(shared=self._is_shared)
        start = 0
        for bucket in buckets:
            for memory in self._memory:
                bucket.buffers.append(Buffer(bucket, memory.part(start, start + bucket.numel)))
            start += bucket.numel * keeps
            if bucket.is_sharded:
                self._give_shard(bucket)
            for buffer in bucket.buffers:
                buffer.transport = transport(bucket, buffer.memory, self._group)
                bucket.use(buffer)
        return buckets

    def clear(self) -> None:
        """Zero this rank's memory: a new layout has its padding elsewhere."""
        for memory in self._memory:
            memory.own.zero_()

    def take_turn(self, bucket: Bucket) -> None:
        """Give a bucket without memory of its own the next piece; first that must have been summed on every rank."""
        # In shared memory a rank that is told of a full piece learns that the one before it is free.
        most = 1 if self._is_shared else len(self._memory)
        while len(self._under_way) >= most or bucket in self._under_way:  # of an earlier pass, in its other piece
            self._under_way.popleft().finish(1.0)
        bucket.use(bucket.buffers[self._turn % len(self._memory)])
        self._turn += 1
        self._under_way.append(bucket)

    def finish_turns(self) -> None:
        """End the sums of all buckets that have a turn."""
        while self._under_way:
            self._under_way.popleft().finish(1.0)

    @property
    def _is_shared(self) -> bool:
        memory, *_ = self._memory
        return memory.every is not None

    def _transport(self, shared: bool) -> type[Transport]:
        shared = shared and self._sum.options.shared_memory is not False
        fitting = (one for one in TRANSPORTS if shared or not one.shares_memory)
        return next(one for one in fitting if one.serves(self._group, self._device))

    def _give_shard(self, bucket: Bucket) -> None:
        sharding = self._sum.sharding
        assert sharding is not None
        dtype = torch.float32 if sharding.wide and self._dtype in HALVES else self._dtype
        device = sharding.device or self._device
        if sharding.keep_whole and (dtype, device) == (self._dtype, self._device):
            (buffer,) = bucket.buffers
            bucket.shard = GradientShard(buffer.flat[bucket.own][: bucket.used])
        else:
            # What goes between the host and a device is fast only from pinned memory.
            pinned = device.type == "cpu" and self._device.type == "cuda"
            bucket.shard = GradientShard(torch.zeros(bucket.used, dtype=dtype, device=device, pin_memory=pinned))

    def _reserve(self, count: int, numel: int) -> None:
        if any(memory.own.numel() >= numel for memory in self._memory):
            return
        self._memory = []  # what is too small goes before its successor comes
        shared = self._transport(shared=True).shares_memory
        self._memory = [allocate(self._group, numel, self._dtype, self._device, shared) for _ in range(count)]


def fill(sum_: Sum, order: Iterable[int], cap: float, first: float, index: int) -> list[Bucket]:
    """Cut the parameters at the positions in `order` into buckets of at most `cap` bytes.

    A bucket has at least one parameter, and the first takes `first` bytes, so that communication starts early.
    """
    buckets: list[Bucket] = []
    taken: list[int] = []
    left = min(first, cap)
    for position in order:
        nbytes = local_part(sum_.parameters[position]).nbytes
        if taken and nbytes > left:
            buckets.append(Bucket(sum_, taken, index))
            taken, left = [], cap
        taken.append(position)
        left -= nbytes
    return [*buckets, Bucket(sum_, taken, index)] if taken else buckets

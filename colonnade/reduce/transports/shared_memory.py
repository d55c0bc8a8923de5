"""Sums in shared memory, for ranks of one host with gradients on the CPU.

Every rank's buckets lie in memory that all ranks map. Each rank sums its slice of a bucket over all ranks' buffers, in
rank order and in pieces that stay in the cache, and writes the result into every buffer: the same bits on every
rank, whatever the size of the buckets. Of a sharded bucket the slice is all a rank wants.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from colonnade.comm.memory import Memory
from colonnade.comm.rank_group import RankGroup
from colonnade.reduce.transports.base import Transport, is_one, real

if TYPE_CHECKING:
    from colonnade.reduce.bucket import Bucket

_CACHE_BYTES = 512 << 10
"""What the pieces of all ranks together may take of the cache."""


class SharedMemory(Transport):
    """Nothing is started early: the sum is memory traffic of the same cores that run backward.

    Before `finish`, the ranks of the group tell each other that their gradients are in place: once for all buckets, or
    for each one where buckets take turns in the memory.
    """

    name = "shared memory"
    bucket_mb = 4.0
    shares_memory = True
    host_waits = True

    @classmethod
    def serves(cls, group: RankGroup, device: torch.device) -> bool:
        return group.sockets is not None and device.type == "cpu"

    def __init__(self, bucket: Bucket, memory: Memory, group: RankGroup) -> None:
        assert memory.every is not None
        self._group = group
        self._tells = not bucket.keeps_gradients
        options = bucket.sum.options
        self.early = self._tells and options.overlap is not False and not bucket.sum.between_stages
        dtype = bucket.layout.dtype
        self._sum_dtype = options.sum_dtype(dtype)
        self._shard = bucket.shard
        width = length = bucket.numel // group.size
        if self._shard is not None:
            length = bucket.used
            # In a wider one it costs nothing: the shard is as wide.
            self._sum_dtype = max(self._sum_dtype, self._shard.flat.dtype, key=lambda one: one.itemsize)
        self.reduced_in = self._sum_dtype
        self._convert = self._sum_dtype != dtype and not dtype.is_complex
        self._pieces = _pieces([real(one[group.index * width :][:length]) for one in memory.every])

    def start(self) -> None:
        if self._tells:
            self._group.signal(b"f")

    def finish(self, factor: float | Tensor) -> None:
        if self._tells:
            self._group.collect()
        at = 0
        for first, *others in self._pieces:
            if self._shard is not None:
                self._shard.land(self._added(first, others, in_place=False), factor, at)
                at += first.numel()
                continue
            total = self._added(first, others, in_place=True)
            if not is_one(factor):
                total.mul_(factor)
            if self._convert:
                first.copy_(total)
            for other in others:
                other.copy_(first)

    def _added(self, first: Tensor, others: list[Tensor], in_place: bool) -> Tensor:
        if self._convert:
            total = first.to(self._sum_dtype)
        elif in_place:
            total = first
        else:
            second, *others = others
            total = first + second
        for other in others:
            total.add_(other)
        return total


def _pieces(slices: list[Tensor]) -> list[tuple[Tensor, ...]]:
    """The slices of all ranks, cut alike: per piece its neighbours in rank order."""
    width = sum(one.element_size() for one in slices)
    step = max(4096, _CACHE_BYTES // width)
    return [*zip(*(one.split(step) for one in slices), strict=True)]

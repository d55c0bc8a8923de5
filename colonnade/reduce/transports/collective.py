"""Sums by collectives of the process group.

A scheme is a generator: it starts a collective, yields what to wait for, and goes on when that is done. On the
CPU it runs up to its first wait when the bucket is full and to its end in `finish`; with NCCL all of it is queued
on a side stream at once. Either way every rank issues the same collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.comm.memory import Memory
from colonnade.comm.rank_group import RankGroup
from colonnade.comm.torch_versions import all_gather_flat, reduce_scatter_flat
from colonnade.reduce.transports.base import Transport, is_one, real

if TYPE_CHECKING:
    from colonnade.reduce.bucket import Bucket

_PIECE_BYTES = 4 << 20
"""Gloo runs two collectives of a group at once, so that a bucket goes out in several."""

Steps = Iterator[tuple[Any, Tensor | None]]
"""What to wait for (None: nothing), and the summed part that is then ready (None: none yet)."""


class Collective(Transport):
    """By any backend whose collectives the host waits for."""

    name = "process group"
    bucket_mb = 8.0
    host_waits = True
    _piece_bytes = _PIECE_BYTES

    @classmethod
    def serves(cls, group: RankGroup, device: torch.device) -> bool:
        return True

    def __init__(self, bucket: Bucket, memory: Memory, group: RankGroup) -> None:
        options, dtype = bucket.sum.options, bucket.layout.dtype
        self.early = options.overlap is not False and not bucket.sum.between_stages
        self._shard, self._used = bucket.shard, bucket.used
        self._group, self._whole = group, real(memory.own)
        self._wire, self._sum_dtype = options.wire_dtype(dtype), options.sum_dtype(dtype)
        self._in_order = options.fixed_order
        # A mean, not a sum, goes back in a narrow dtype: the sum could overflow it.
        self._rescale = 1.0
        self._in_slices = options.fixed_order or self._wire != self._sum_dtype
        if self._in_slices:
            if self._shard is not None:
                self._sum_dtype = max(self._sum_dtype, self._shard.flat.dtype, key=lambda one: one.itemsize)
            elif self._wire != self._sum_dtype:
                self._rescale = float(group.size)
        else:
            self.divides = self.carries = self._shard is None
        self.reduced_in = self._wire if self._wire.itemsize < self._whole.dtype.itemsize else self._sum_dtype
        self._steps: Steps = iter(())

    def start(self) -> None:
        steps = self._scheme()
        self._steps = chain([next(steps)], steps)

    def wait(self) -> None:
        parts = []
        for work, part in self._steps:
            work.wait()
            parts.append((None, part))
        self._steps = iter(parts)

    def finish(self, factor: float | Tensor) -> None:
        factor = factor * self._rescale
        for work, part in self._steps:
            if work is not None:
                work.wait()
            if part is not None:
                self._put(part, factor)
        self._steps = iter(())  # what was under way holds on to its tensors

    def _scheme(self) -> Steps:
        if self._in_slices:
            return self._sliced()
        return self._plain() if self._shard is None else self._scattered()

    def _put(self, part: Tensor, factor: float | Tensor) -> None:
        if self._shard is not None:
            self._shard.land(part[: self._used], factor)
        elif not is_one(factor):
            part.mul_(factor)

    def _plain(self) -> Steps:
        """All-reduce in the bucket's own dtype; all pieces are under way before the first is waited for."""
        pieces = self._whole.chunk(max(1, round(self._whole.nbytes / self._piece_bytes)))
        works = [(dist.all_reduce(piece, group=self._group.group, async_op=True), piece) for piece in pieces]
        yield from works

    def _scattered(self) -> Steps:
        """Reduce-scatter in the bucket's own dtype."""
        part = self._whole.new_empty(self._whole.numel() // self._group.size)
        yield reduce_scatter_flat(part, self._whole, group=self._group.group, async_op=True), part

    def _sliced(self) -> Steps:
        """Each rank adds one slice over all ranks, and sends the result to all unless it is the owner's alone.

        Moves as many bytes as an all-reduce, but the gradients travel in the wire's dtype and are added in another,
        and in fixed order no element's bits depend on where it lies.
        """
        size, whole = self._group.size, self._whole
        sent = whole.to(self._wire)
        received = torch.empty_like(sent)
        yield dist.all_to_all_single(received, sent, group=self._group.group, async_op=True), None
        total = self._added(received.view(size, -1))
        if self._shard is not None:
            yield None, total
            return
        part = total if self._rescale == 1.0 else total.div_(size).to(self._wire)
        work = all_gather_flat(sent, part.contiguous(), group=self._group.group, async_op=True)
        yield work, whole if sent is whole else None
        if sent is not whole:
            whole.copy_(sent)
            yield None, whole

    def _added(self, rows: Tensor) -> Tensor:
        if not self._in_order:
            return rows.sum(0, dtype=self._sum_dtype)
        first, *others = rows
        total = first.to(self._sum_dtype)
        for row in others:
            total.add_(row)
        return total

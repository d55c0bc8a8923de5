"""Transports: the ways to sum the gradients of a bucket over the ranks of a group.

`Transport` is the interface. Of the list `TRANSPORTS`, at the end, the first that `serves` a group and a device is used: a group of
one rank, shared memory, NCCL, any other process group. A new transport is a class here and an entry in the list before
`CollectiveTransport`, which serves every group. Two places choose a transport without the list: `uneven.finish_uneven`, for
gradients outside the buckets, and the planner (`proof/planner/planned_sums.py`), which has no processes to ask.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.comm.groups import GroupMemory, RankGroup
from colonnade.comm.torch_versions import all_gather_flat, reduce_scatter_flat

if TYPE_CHECKING:
    from colonnade.gradients.bucket import Bucket


class Transport(ABC):
    """Base class of transports. An object reduces one bucket in one of its buffers.

    For a sharded bucket `finish` stores the reduced slice in the `GradientShard` of its owner; for any other bucket every rank
    has the full sum in its buffer. All ranks start the same buckets in the same order.
    """

    name: ClassVar[str]
    bucket_mb: ClassVar[float]
    """The default bucket size."""
    first_bucket_mb: ClassVar[float] = 1.0
    """The size of the first bucket: small, so that communication starts early."""
    shares_memory: ClassVar[bool] = False
    """Whether it needs memory that all ranks of the group map."""
    early: bool = False
    """Whether a start before the end of backward gains time."""
    carries: bool = False
    """Whether it also sums piggybacked numbers, which are stored after the gradients."""
    host_waits: ClassVar[bool] = False
    """Whether the host waits in `finish` for the end of the reduction."""
    reduced_in: torch.dtype | None = None
    """The dtype of the sum, or the narrower one that gradients are sent in; None for a single rank."""

    @classmethod
    @abstractmethod
    def serves(cls, group: RankGroup, device: torch.device) -> bool:
        """Whether this transport can reduce gradients on this device over the ranks of this group."""

    @classmethod
    def sizes(cls, total: float, ranks: int) -> tuple[float, float]:
        """Return (bucket size, size of the first bucket) in MiB, for `total` MiB of gradients reduced over `ranks` ranks."""
        return cls.bucket_mb, cls.first_bucket_mb

    @abstractmethod
    def __init__(self, bucket: Bucket, memory: GroupMemory, group: RankGroup) -> None: ...

    @abstractmethod
    def start(self) -> None:
        """Start the reduction of the gradients in the buffer; may return before anything is sent."""

    def wait(self) -> None:
        """Wait for the sum, before `finish` multiplies it; only for transports that carry piggybacked numbers."""
        raise NotImplementedError(f"{type(self).__name__} carries nothing")

    @abstractmethod
    def finish(self, factor: float | Tensor) -> None:
        """Wait for the reduction, and multiply the sum by `factor`; afterwards the result is in place."""


def real(flat: Tensor) -> Tensor:
    """View a complex buffer as real numbers; return other buffers unchanged."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def is_one(factor: float | Tensor) -> bool:
    """Whether the factor is known to be 1 without a read of the device."""
    return isinstance(factor, float) and factor == 1.0


# --- By collectives of a process group ---

_PIECE_BYTES = 4 << 20
"""Gloo runs two collectives of a group at once, so a bucket is sent in several chunks."""

Steps = Iterator[tuple[Any, Tensor | None]]
"""(work to wait for or None, the part of the buffer that is then reduced or None)."""


class CollectiveTransport(Transport):
    """Reduces buckets by collectives of any backend, such as gloo. The host waits for each collective.

    A scheme (`_plain`, `_scattered`, `_sliced`) is a generator: it starts a collective, yields its work, and continues once the
    work is done. It runs up to its first wait as soon as the bucket is full, and runs to its end in `finish`. So each
    rank issues the collectives of its buckets in the same order.
    """

    name = "process group"
    bucket_mb = 8.0
    host_waits = True
    _piece_bytes = _PIECE_BYTES

    @classmethod
    def serves(cls, group: RankGroup, device: torch.device) -> bool:
        return True

    def __init__(self, bucket: Bucket, memory: GroupMemory, group: RankGroup) -> None:
        options, dtype = bucket.sum.options, bucket.layout.dtype
        self.early = options.overlap is not False and not bucket.sum.between_stages
        self._shard, self._used = bucket.shard, bucket.used
        self._group, self._flat = group, real(memory.own)
        self._wire, self._sum_dtype = options.wire_dtype(dtype), options.sum_dtype(dtype)
        self._in_order = options.fixed_order
        # In a narrow dtype a mean is sent back, since the sum could overflow it; `finish` multiplies by the number of ranks.
        self._rescale = 1.0
        self._in_slices = options.fixed_order or self._wire != self._sum_dtype
        if self._in_slices:
            if self._shard is not None:
                self._sum_dtype = max(self._sum_dtype, self._shard.flat.dtype, key=lambda dtype: dtype.itemsize)
            elif self._wire != self._sum_dtype:
                self._rescale = float(group.size)
        else:
            self.carries = self._shard is None
        self.reduced_in = self._wire if self._wire.itemsize < self._flat.dtype.itemsize else self._sum_dtype
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
        self._steps = iter(())  # the generator would keep its tensors alive

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
        """All-reduce in the bucket's own dtype; all chunks are started before the first is waited for."""
        pieces = self._flat.chunk(max(1, round(self._flat.nbytes / self._piece_bytes)))
        works = [(dist.all_reduce(piece, group=self._group.group, async_op=True), piece) for piece in pieces]
        yield from works

    def _scattered(self) -> Steps:
        """Reduce-scatter in the bucket's own dtype."""
        part = self._flat.new_empty(self._flat.numel() // self._group.size)
        yield reduce_scatter_flat(part, self._flat, group=self._group.group, async_op=True), part

    def _sliced(self) -> Steps:
        """All-to-all, local sum of one slice, all-gather (unless the bucket is sharded).

        As many bytes as an all-reduce. But gradients are sent in one dtype (`compress`) and summed in another, and with
        `fixed_order` the bits of a sum do not depend on the position of the element in the bucket.
        """
        size, flat = self._group.size, self._flat
        sent = flat.to(self._wire)
        received = torch.empty_like(sent)
        yield dist.all_to_all_single(received, sent, group=self._group.group, async_op=True), None
        total = self._added(received.view(size, -1))
        if self._shard is not None:
            yield None, total
            return
        part = total if self._rescale == 1.0 else total.div_(size).to(self._wire)
        work = all_gather_flat(sent, part.contiguous(), group=self._group.group, async_op=True)
        yield work, flat if sent is flat else None
        if sent is not flat:
            flat.copy_(sent)
            yield None, flat

    def _added(self, rows: Tensor) -> Tensor:
        if not self._in_order:
            return rows.sum(0, dtype=self._sum_dtype)
        first, *others = rows
        total = first.to(self._sum_dtype)
        for row in others:
            total.add_(row)
        return total


class DeviceCollectiveTransport(CollectiveTransport):
    """Reduces buckets by collectives on a device (NCCL).

    `start` queues all of them on a side stream, so the host does not wait.
    """

    bucket_mb = 25.0
    most_mb = 100.0
    host_waits = False
    _piece_bytes = 1 << 62

    @classmethod
    def sizes(cls, total: float, ranks: int) -> tuple[float, float]:
        """The sizes for a device.

        Buckets are few, because each bucket costs a launch on every rank. With more ranks, buckets are larger, because the slice of a
        rank is smaller.
        """
        size = min(max(cls.bucket_mb, total / 3, ranks / 2), cls.most_mb)
        return size, size / 2

    @classmethod
    def serves(cls, group: RankGroup, device: torch.device) -> bool:
        return device.type == "cuda" and "cuda:nccl" in dist.get_backend_config(group.group)

    def __init__(self, bucket: Bucket, memory: GroupMemory, group: RankGroup) -> None:
        super().__init__(bucket, memory, group)
        self._stream = torch.cuda.Stream(memory.own.device)
        self._ready: list[Tensor] = []

    def start(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._flat.device))
        with torch.cuda.stream(self._stream):
            for work, part in self._scheme():
                if work is not None:
                    work.wait()
                if part is not None:
                    self._ready.append(part)

    def wait(self) -> None:
        torch.cuda.current_stream(self._flat.device).wait_stream(self._stream)

    def finish(self, factor: float | Tensor) -> None:
        stream = torch.cuda.current_stream(self._flat.device)
        stream.wait_stream(self._stream)
        for part in self._ready:
            part.record_stream(stream)  # allocated on the side stream, and used on this one from now on
            self._put(part, factor * self._rescale)
        self._ready = []


# --- A single rank: nothing is sent ---


class LocalTransport(Transport):
    """The transport for a group of one rank: nothing is sent, only `factor` is multiplied."""

    name = "local"
    bucket_mb = 100.0  # an early start gains nothing, so few large copies

    @classmethod
    def serves(cls, group: RankGroup, device: torch.device) -> bool:
        return group.alone

    def __init__(self, bucket: Bucket, memory: GroupMemory, group: RankGroup) -> None:
        self._shard, self._used, self._memory = bucket.shard, bucket.used, memory.own

    def start(self) -> None:
        pass

    def finish(self, factor: float | Tensor) -> None:
        if self._shard is not None:
            self._shard.land(self._memory[: self._used], factor)
        elif not is_one(factor):
            real(self._memory).mul_(factor)


# --- Shared memory, on one host ---

_CACHE_BYTES = 512 << 10
"""The part of the cache for the chunks of all ranks together."""


class SharedMemoryTransport(Transport):
    """Reduction in shared CPU memory, for ranks on one host.

    Each rank sums its slice of a bucket over the buffers of all ranks, in rank order and in chunks that stay in the cache, and
    writes the result to every buffer. So all ranks have the same bits, for any bucket size. For a sharded bucket, each rank keeps
    only the sum of its own slice.

    Buckets are not started early, because the sum would compete with backward for the same cores. Before `finish` the ranks
    signal each other that their gradients are complete: once for all buckets, or for each bucket if these share staging buffers.
    """

    name = "shared memory"
    bucket_mb = 4.0
    shares_memory = True
    host_waits = True

    @classmethod
    def serves(cls, group: RankGroup, device: torch.device) -> bool:
        return group.sockets is not None and device.type == "cpu"

    def __init__(self, bucket: Bucket, memory: GroupMemory, group: RankGroup) -> None:
        assert memory.every is not None
        self._group = group
        self._signals = not bucket.keeps_gradients
        options = bucket.sum.options
        self.early = self._signals and options.overlap is not False and not bucket.sum.between_stages
        dtype = bucket.layout.dtype
        self._sum_dtype = options.sum_dtype(dtype)
        self._shard = bucket.shard
        width = length = bucket.numel // group.size
        if self._shard is not None:
            length = bucket.used
            # The dtype of the shard, if wider: it needs no further memory.
            self._sum_dtype = max(self._sum_dtype, self._shard.flat.dtype, key=lambda dtype: dtype.itemsize)
        self.reduced_in = self._sum_dtype
        self._convert = self._sum_dtype != dtype and not dtype.is_complex

        # Chunks of this rank's slice: of each the views into the buffers of all ranks, in rank order.
        slices = [real(buffer[group.index * width :][:length]) for buffer in memory.every]
        step = max(4096, _CACHE_BYTES // sum(part.element_size() for part in slices))
        self._pieces = [*zip(*(part.split(step) for part in slices), strict=True)]

    def start(self) -> None:
        if self._signals:
            self._group.signal(b"f")

    def finish(self, factor: float | Tensor) -> None:
        if self._signals:
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


TRANSPORTS: list[type[Transport]] = [
    LocalTransport,
    SharedMemoryTransport,
    DeviceCollectiveTransport,
    CollectiveTransport,
]

__all__ = ["TRANSPORTS", "Transport"]

"""Transports: how one bucket's gradients are summed over the ranks of a group.

`Transport` is the contract. `TRANSPORTS`, at the end, is tried from the first to the last, and the first that `serves` a group and a
device is used: nothing to send, shared memory, NCCL, any other process group. A new transport is a class here, and a name in the list
before `CollectiveTransport`, which serves every group. Two places choose a transport without the list: `uneven.finish_uneven`, for the
gradients of some ranks only, and the planner (`proof/planner/planned_sums.py`), which has no processes to ask.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.comm.rank_group import GroupMemory, RankGroup
from colonnade.comm.torch_versions import all_gather_flat, reduce_scatter_flat

if TYPE_CHECKING:
    from colonnade.gradients.bucket import Bucket


class Transport(ABC):
    """Sums one bucket in one piece of memory.

    Of a sharded bucket `finish` lands the sum of the owned slice (`bucket.land`); of any other it leaves the whole
    sum in the memory of every rank. Every rank starts the same buckets in the same order.
    """

    name: ClassVar[str]
    bucket_mb: ClassVar[float]
    """The size of bucket that suits it."""
    first_bucket_mb: ClassVar[float] = 1.0
    """That of the bucket which is full first: small, so that communication starts early."""
    shares_memory: ClassVar[bool] = False
    """Whether it needs memory that all ranks of the group see."""
    early: bool = False
    """Whether starting before the end of backward is of use."""
    carries: bool = False
    """Whether every rank gets the sum of a few more numbers that stand behind the gradients."""
    host_waits: ClassVar[bool] = False
    """Whether the host waits in `finish` until the sum is there."""
    reduced_in: torch.dtype | None = None
    """The dtype of the sum, or a narrower one that gradients are sent in; None where nothing is summed over ranks."""

    @classmethod
    @abstractmethod
    def serves(cls, group: RankGroup, device: torch.device) -> bool:
        """Whether it can sum gradients on this device over these ranks."""

    @classmethod
    def sizes(cls, total: float, ranks: int) -> tuple[float, float]:
        """(size of a bucket, of the first) in MiB, for gradients of `total` MiB over so many ranks."""
        return cls.bucket_mb, cls.first_bucket_mb

    @abstractmethod
    def __init__(self, bucket: Bucket, memory: GroupMemory, group: RankGroup) -> None: ...

    @abstractmethod
    def start(self) -> None:
        """Begin, when the gradients are in the memory; may return before anything is sent."""

    def wait(self) -> None:
        """Before `finish`, of one that carries: have the sum there, not multiplied yet."""
        raise NotImplementedError(f"{type(self).__name__} carries nothing")

    @abstractmethod
    def finish(self, factor: float | Tensor) -> None:
        """Return when the sum is there, multiplied by `factor`."""


def real(flat: Tensor) -> Tensor:
    """A complex buffer as twice as many reals, another as it is."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def is_one(factor: float | Tensor) -> bool:
    """Whether multiplying by it changes nothing, as far as can be told without looking at a device."""
    return isinstance(factor, float) and factor == 1.0


# --- By collectives of a process group ---

_PIECE_BYTES = 4 << 20
"""Gloo runs two collectives of a group at once, so that a bucket goes out in several."""

Steps = Iterator[tuple[Any, Tensor | None]]
"""What to wait for (None: nothing), and the summed part that is then ready (None: none yet)."""


class CollectiveTransport(Transport):
    """By any backend whose collectives the host waits for.

    A scheme (`_plain`, `_scattered`, `_sliced`) is a generator: it starts a collective, yields what to wait for, and goes on when
    that is done. Here it runs up to its first wait when the bucket is full, and to its end in `finish`. Either way every rank
    issues the same collectives in the same order.
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
            self.carries = self._shard is None
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
        # Sent back as a mean where the dtype of the wire is narrower: a sum could overflow it. `finish` multiplies by the size again.
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


class DeviceCollectiveTransport(CollectiveTransport):
    """By a backend that queues its collectives on a device (NCCL): all of a scheme is queued on a side stream at once, and the host
    waits for nothing."""

    bucket_mb = 25.0
    most_mb = 100.0
    host_waits = False
    _piece_bytes = 1 << 62

    @classmethod
    def sizes(cls, total: float, ranks: int) -> tuple[float, float]:
        """Few buckets: each costs a launch on every rank. Larger over more ranks, of which each gets a slice."""
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
        self._stream.wait_stream(torch.cuda.current_stream(self._whole.device))
        with torch.cuda.stream(self._stream):
            for work, part in self._scheme():
                if work is not None:
                    work.wait()
                if part is not None:
                    self._ready.append(part)

    def wait(self) -> None:
        torch.cuda.current_stream(self._whole.device).wait_stream(self._stream)

    def finish(self, factor: float | Tensor) -> None:
        stream = torch.cuda.current_stream(self._whole.device)
        stream.wait_stream(self._stream)
        for part in self._ready:
            part.record_stream(stream)
            self._put(part, factor * self._rescale)
        self._ready = []


# --- Of one rank: nothing is sent ---


class LocalTransport(Transport):
    """For a group of one rank: multiplies by the factor."""

    name = "local"
    bucket_mb = 100.0  # nothing is won by starting early: few large moves

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


# --- In shared memory, on one host ---

_CACHE_BYTES = 512 << 10
"""The part of the cache that the pieces of all ranks together may take."""


class SharedMemoryTransport(Transport):
    """Every rank's buckets lie in memory that all ranks map. Each rank sums its slice of a bucket over all ranks' buffers, in rank
    order and in pieces that stay in the cache, and writes the result into every buffer: the same bits on every rank, whatever the
    size of the buckets. Of a sharded bucket the slice is all a rank wants.

    Nothing is started early: the sum is memory traffic of the same cores that run backward. Before `finish`, the ranks
    of the group signal each other that their gradients are in place: once for all buckets, or for each bucket where they share
    staging buffers.
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
            # In a wider one it costs nothing: the shard is as wide.
            self._sum_dtype = max(self._sum_dtype, self._shard.flat.dtype, key=lambda one: one.itemsize)
        self.reduced_in = self._sum_dtype
        self._convert = self._sum_dtype != dtype and not dtype.is_complex
        self._pieces = _pieces([real(one[group.index * width :][:length]) for one in memory.every])

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


def _pieces(slices: list[Tensor]) -> list[tuple[Tensor, ...]]:
    """The slices of all ranks, cut alike: per piece its neighbours in rank order."""
    width = sum(one.element_size() for one in slices)
    step = max(4096, _CACHE_BYTES // width)
    return [*zip(*(one.split(step) for one in slices), strict=True)]


TRANSPORTS: list[type[Transport]] = [
    LocalTransport,
    SharedMemoryTransport,
    DeviceCollectiveTransport,
    CollectiveTransport,
]

__all__ = ["TRANSPORTS", "Transport"]

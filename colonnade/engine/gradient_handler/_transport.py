"""Reduction by collectives of the process group, and the choice of a transport for a bucket.

A scheme is a generator: it starts a collective, yields what to wait for, and goes on when that is done. On the
CPU it runs up to its first wait when the bucket is full and to its end in `finish`; with NCCL all of it is queued
on a side stream at once. Either way every rank issues the same collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.engine.gradient_handler._bucket import Bucket
from colonnade.engine.gradient_handler._compress import LowRankSum
from colonnade.engine.gradient_handler._options import PowerSGD, SyncOptions
from colonnade.engine.gradient_handler._party import Party, all_gather_flat
from colonnade.engine.gradient_handler._shared_memory import real

_PIECE_BYTES = 4 << 20
"""Gloo runs two collectives of a group at once, so that a bucket goes out in several."""

Steps = Iterator[tuple[Any, Tensor | None]]
"""What to wait for (None: nothing), and the piece of the room that is then summed (None: none yet)."""


class Scheme(Protocol):
    """Sums a room over the ranks; the result is to be multiplied by `rescale`."""

    rescale: float

    def run(self, room: Tensor) -> Steps: ...


class CollectiveTask:
    """One bucket, reduced by the collectives of its group."""

    def __init__(self, bucket: Bucket, party: Party, scheme: Scheme, early: bool) -> None:
        self.early = early
        self.divided = isinstance(scheme, PlainSum)
        self._room = real(bucket.room)
        self._scheme = scheme
        self._stream = _side_stream(self._room.device, party)
        self._steps: Steps = iter(())

    def start(self) -> None:
        """Issue the first collectives (with NCCL: all)."""
        steps = self._scheme.run(self._room)
        if self._stream is None:
            self._steps = chain([next(steps)], steps)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._room.device))
        with torch.cuda.stream(self._stream):
            for work, _ in steps:
                if work is not None:
                    work.wait()

    def finish(self, factor: float | Tensor) -> None:
        """Wait, and multiply what is then summed."""
        factor = factor * self._scheme.rescale
        unit = isinstance(factor, float) and factor == 1.0
        if self._stream is not None:
            torch.cuda.current_stream(self._room.device).wait_stream(self._stream)
            if not unit:
                self._room.mul_(factor)
            return
        for work, piece in self._steps:
            if work is not None:
                work.wait()
            if piece is not None and not unit:
                piece.mul_(factor)


class LocalTask:
    """A bucket that no other rank shares."""

    early = divided = False

    def __init__(self, bucket: Bucket) -> None:
        self._room = real(bucket.room)

    def start(self) -> None:
        """Nothing to send."""

    def finish(self, factor: float | Tensor) -> None:
        """The factor is all that is left."""
        if not (isinstance(factor, float) and factor == 1.0):
            self._room.mul_(factor)


class PlainSum:
    """All-reduce in the bucket's own dtype."""

    rescale = 1.0

    def __init__(self, group: dist.ProcessGroup, piece_bytes: int) -> None:
        self._group = group
        self._piece_bytes = piece_bytes

    def run(self, room: Tensor) -> Steps:
        """All pieces are under way before the first is waited for."""
        pieces = room.chunk(max(1, round(room.nbytes / self._piece_bytes)))
        works = [(dist.all_reduce(piece, group=self._group, async_op=True), piece) for piece in pieces]
        yield from works


class SlicedSum:
    """Each rank sums one slice over all ranks, in rank order, and sends the result to all.

    Moves as many bytes as an all-reduce, but the gradients travel in the `wire` dtype and are added in the
    `sum_dtype`, and no element's bits depend on where it lies.
    """

    def __init__(self, party: Party, wire: torch.dtype, sum_dtype: torch.dtype) -> None:
        self._party = party
        self._wire, self._sum_dtype = wire, sum_dtype
        # The mean, not the sum, goes into a narrow dtype: the sum could overflow it.
        self.rescale = 1.0 if wire == sum_dtype else float(party.size)

    def run(self, room: Tensor) -> Steps:
        group, size = self._party.group, self._party.size
        sent = room.to(self._wire)
        received = torch.empty_like(sent)
        yield dist.all_to_all_single(received, sent, group=group, async_op=True), None
        first, *others = received.view(size, -1)
        total = first.to(self._sum_dtype)
        for other in others:
            total.add_(other)
        part = total if self.rescale == 1.0 else total.div_(size).to(self._wire)
        yield all_gather_flat(sent, part.contiguous(), group=group, async_op=True), room if sent is room else None
        if sent is not room:
            room.copy_(sent)
            yield None, room


def collective_task(bucket: Bucket, party: Party, options: SyncOptions) -> CollectiveTask:
    """The task that reduces `bucket` over the group of `party` as the options say."""
    assert party.group is not None
    early = options.overlap is not False and not bucket.reduction.between_stages
    return CollectiveTask(bucket, party, _scheme(bucket, party, options), early)


def sum_dtype(dtype: torch.dtype, options: SyncOptions) -> torch.dtype:
    """The dtype in which gradients of `dtype` are added: never narrower; fp16 would overflow in its own."""
    wanted = options.reduce_dtype or (torch.float32 if dtype is torch.float16 else dtype)
    return wanted if not dtype.is_complex and wanted.itemsize > dtype.itemsize else _real_dtype(dtype)


def _scheme(bucket: Bucket, party: Party, options: SyncOptions) -> Scheme:
    assert party.group is not None
    dtype = _real_dtype(bucket.layout.dtype)
    compression, summed = options.compression, sum_dtype(bucket.layout.dtype, options)
    if isinstance(compression, PowerSGD) and not bucket.layout.dtype.is_complex:
        return LowRankSum(bucket, party.group, compression)
    narrow = isinstance(compression, torch.dtype) and compression.itemsize < dtype.itemsize
    wire = compression if isinstance(compression, torch.dtype) and narrow else dtype
    if options.fixed_order or wire != summed:
        return SlicedSum(party, wire, summed)
    on_cpu = bucket.room.device.type == "cpu"
    return PlainSum(party.group, _PIECE_BYTES if on_cpu else max(1, bucket.room.nbytes))


def _real_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _side_stream(device: torch.device, party: Party) -> torch.cuda.Stream | None:
    """Where the whole scheme is queued at once; None where waiting for a collective holds up the host."""
    if device.type == "cuda" and "cuda:nccl" in dist.get_backend_config(party.group):
        return torch.cuda.Stream(device)
    return None

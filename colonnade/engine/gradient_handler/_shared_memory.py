"""Reduction in shared memory, for ranks of one host with gradients on the CPU.

Every rank's buckets lie in anonymous shared memory that all ranks map. Each rank sums its slice of a bucket
over all ranks' buffers, in rank order and in pieces that stay in the cache, and writes the result into every
buffer: the same bits on every rank, whatever the size of the buckets. The memory has no name in any file
system, so that nothing outlives the processes however they end, and no mount's size limits it.
"""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor

from colonnade.engine.gradient_handler._bucket import Bucket
from colonnade.engine.gradient_handler._party import Party

_CACHE_BYTES = 512 << 10
"""What the pieces of all ranks together may take of the cache."""


def allocate_shared(party: Party, numel: int, dtype: torch.dtype) -> tuple[list[Tensor], None] | tuple[None, str]:
    """Memory of `numel` elements on every rank: all ranks' tensors in party order, or why not. Collective."""
    assert party.peers is not None
    nbytes = max(1, numel * dtype.itemsize)
    descriptor, problem = _reserve(nbytes)
    problems = [text for text in party.gather_objects(problem) if text]
    if problems or descriptor is None:
        if descriptor is not None:
            os.close(descriptor)
        return None, problems[0]
    descriptors = party.peers.swap_descriptors(descriptor)
    descriptors[party.index] = descriptor
    return [_map(descriptors[index], nbytes, numel, dtype) for index in range(party.size)], None


class SharedTask:
    """One bucket in shared memory: this rank's slice of it, in every rank's buffer.

    Nothing is started early: the sum is memory traffic of the same cores that run backward.
    """

    early = divided = False

    def __init__(self, bucket: Bucket, rooms: list[Tensor], index: int, sum_dtype: torch.dtype) -> None:
        self._pieces = _pieces([real(room) for room in rooms], index)
        self._convert = sum_dtype != bucket.layout.dtype and not bucket.layout.dtype.is_complex
        self._sum_dtype = sum_dtype

    def start(self) -> None:
        """Nothing to do: the gradients are where every rank sees them."""

    def finish(self, factor: float | Tensor) -> None:
        """Reduce this rank's slice. The caller has made sure that every rank's gradients are in place."""
        for first, *others in self._pieces:
            total = first.to(self._sum_dtype) if self._convert else first
            for other in others:
                total.add_(other)
            if not (isinstance(factor, float) and factor == 1.0):
                total.mul_(factor)
            if self._convert:
                first.copy_(total)
            for other in others:
                other.copy_(first)


def real(flat: Tensor) -> Tensor:
    """A complex buffer as twice as many reals, another as it is."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def _reserve(nbytes: int) -> tuple[int, None] | tuple[None, str]:
    """Anonymous memory whose pages exist, so that running out is an error now and no signal later."""
    descriptor = -1
    try:
        descriptor = os.memfd_create("colonnade-gradients", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, nbytes)
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        return None, f"{nbytes / 2**20:.1f} MiB of shared memory cannot be had: {error.strerror}"
    return descriptor, None


def _map(descriptor: int, nbytes: int, numel: int, dtype: torch.dtype) -> Tensor:
    """The memory behind `descriptor`, which is closed; it lives as long as the tensor."""
    mapping = mmap.mmap(descriptor, nbytes)
    os.close(descriptor)
    return torch.frombuffer(mapping, dtype=dtype, count=numel)


def _pieces(rooms: list[Tensor], index: int) -> list[list[Tensor]]:
    """This rank's slice of every room, cut alike: one list of neighbours in rank order per piece."""
    width = rooms[0].numel() // len(rooms)
    step = max(4096, _CACHE_BYTES // (len(rooms) * rooms[0].element_size()))
    stop = (index + 1) * width
    return [[room[start : min(start + step, stop)] for room in rooms] for start in range(index * width, stop, step)]

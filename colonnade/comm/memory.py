"""Flat memory of one rank, or of all ranks of a host at once.

Shared memory is anonymous: it has no name in any file system, so that nothing outlives the processes however they
end, and no mount's size limits it.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from colonnade.comm.rank_group import RankGroup

HEAP_BYTES = 31 << 20


@dataclass(frozen=True, eq=False)
class Memory:
    """Flat memory: this rank's, and (where it is shared) every rank's in group order."""

    own: Tensor
    every: list[Tensor] | None = None

    def part(self, start: int, stop: int) -> Memory:
        """Elements [start, stop) of it."""
        every = [memory[start:stop] for memory in self.every] if self.every is not None else None
        return Memory(self.own[start:stop], every)


def allocate(group: RankGroup, numel: int, dtype: torch.dtype, device: torch.device, shared: bool) -> Memory:
    """Zeroed memory of `numel` elements on every rank. Collective.

    `shared`: in memory that all ranks of the group see, unless their memory cannot be shared. Where the system has no
    room for it, the group says whether that is logged or an error.
    """
    if shared and group.sockets is not None and device.type == "cpu":
        every, problem = allocate_shared(group, numel, dtype)
        if every is not None:
            return Memory(every[group.index], every)
        group.cannot_share(problem or "")
    return Memory(torch.zeros(numel, dtype=dtype, device=device))


def allocate_shared(group: RankGroup, numel: int, dtype: torch.dtype) -> tuple[list[Tensor], None] | tuple[None, str]:
    """All ranks' tensors of `numel` elements in group order, or why there are none. Collective."""
    assert group.sockets is not None
    nbytes = max(1, numel) * dtype.itemsize
    descriptor, problem = _reserve(nbytes)
    problems = [text for text in group.gather_objects(problem) if text]
    if problems or descriptor is None:
        if descriptor is not None:
            os.close(descriptor)
        return None, problems[0]
    descriptors = group.sockets.swap_descriptors(descriptor)
    descriptors[group.index] = descriptor
    return [_map(descriptors[index], nbytes, numel, dtype) for index in range(group.size)], None


def keep_heap() -> None:
    """Make glibc keep freed memory for the next step, instead of giving it back and faulting it in again.

    With gradients in buckets the heap is all but empty after backward, and glibc would shrink it at each step. It
    learns from a large block that is freed: blocks of this size stay on the heap from then on, up to twice as
    much in all (32 MiB is the most it learns from). Elsewhere this does nothing.
    """
    torch.empty(HEAP_BYTES, dtype=torch.uint8, device="cpu")


def _reserve(nbytes: int) -> tuple[int, None] | tuple[None, str]:
    """Anonymous memory whose pages exist, so that running out is an error now and no signal later."""
    descriptor = None
    try:
        descriptor = os.memfd_create("colonnade-shared", os.MFD_CLOEXEC)
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if descriptor is not None:
            os.close(descriptor)
        return None, f"{nbytes / 2**20:.1f} MiB of shared memory cannot be had: {error.strerror}"
    return descriptor, None


def _map(descriptor: int, nbytes: int, numel: int, dtype: torch.dtype) -> Tensor:
    """The memory behind `descriptor`, which is closed; it lives as long as the tensor."""
    mapping = mmap.mmap(descriptor, nbytes)
    os.close(descriptor)
    if numel == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(mapping, dtype=dtype, count=numel)

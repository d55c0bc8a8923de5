"""A copy of the rules of torch's CUDA caching allocator: which segments it reserves for a sequence of allocations and frees.

The rules, as in `c10/cuda/CUDACachingAllocator.cpp`: sizes are rounded to 512 bytes; up to 1 MiB comes from segments of 2 MiB,
up to 10 MiB from segments of 20 MiB, and more from segments of its own size, rounded to 2 MiB. Each stream has its own pool of
small and of large blocks. A request takes the smallest free block that is large enough and splits it; a freed block joins its
free neighbours. If the device is full, unused segments are released and the request is tried again.

With `expandable`, as in PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, each pool is one segment that grows at its end.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

MINIMUM, SMALL, SMALL_SEGMENT, LARGE_SEGMENT = 512, 1 << 20, 2 << 20, 20 << 20
"""Smallest block; largest request of the small pool; segments of the small pool, and of requests below `_OWN_SEGMENT`."""
_OWN_SEGMENT, _ROUNDED = 10 << 20, 2 << 20


class OutOfMemory(Exception):
    """The device has too little memory for a request, even after unused segments were released."""


@dataclass(eq=False)
class MemoryBlock:
    """A part of a segment. `before` and `after` are its neighbours in the segment."""

    address: int
    size: int
    pool: BlockPool
    free: bool = False
    before: MemoryBlock | None = None
    after: MemoryBlock | None = None


class BlockPool:
    """The free blocks of one stream and size class, by (size, address)."""

    def __init__(self, small: bool) -> None:
        self.small = small
        self.blocks: dict[int, MemoryBlock] = {}
        self.end: MemoryBlock | None = None
        """With expandable segments: the last block of the one segment."""
        self._sizes: list[tuple[int, int]] = []

    def add(self, block: MemoryBlock) -> None:
        self.blocks[block.address] = block
        insort(self._sizes, (block.size, block.address))

    def remove(self, block: MemoryBlock) -> None:
        del self.blocks[block.address]
        self._sizes.pop(bisect_left(self._sizes, (block.size, block.address)))

    def best(self, size: int) -> MemoryBlock | None:
        """Return the smallest block of at least this size; of equal ones that with the lowest address."""
        at = bisect_left(self._sizes, (size, 0))
        return self.blocks[self._sizes[at][1]] if at < len(self._sizes) else None


class CachingAllocator:
    """Replays allocations. `allocated`, `reserved` and their peaks are in bytes, as torch.cuda.memory_stats counts them."""

    def __init__(self, capacity: float = inf, expandable: bool = False) -> None:
        self.capacity, self.expandable = capacity, expandable
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self._pools: dict[tuple[int, bool], BlockPool] = {}
        self._next = 0

    def allocate(self, nbytes: int, stream: int = 0) -> MemoryBlock:
        """Return a block for a request. Raises OutOfMemory."""
        size = max(MINIMUM, -(-nbytes // MINIMUM) * MINIMUM)
        small = size <= SMALL
        pool = self._pools.setdefault((stream, small), BlockPool(small))
        block = pool.best(size)
        if block is None:
            block = self._grow(pool, size) if self.expandable else self._segment(pool, size)
        else:
            pool.remove(block)
        rest = block.size - size
        if rest >= MINIMUM if small or self.expandable else rest > SMALL:
            other = MemoryBlock(block.address + size, rest, pool, True, block, block.after)
            if block.after is not None:
                block.after.before = other
            block.after, block.size = other, size
            pool.add(other)
            if pool.end is block:
                pool.end = other
        block.free = False
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def release(self, block: MemoryBlock) -> None:
        """Free a block."""
        self.allocated -= block.size
        block.free = True
        pool = block.pool
        for other in (block.before, block.after):
            if other is None or not other.free:
                continue
            pool.remove(other)
            first, second = (other, block) if other is block.before else (block, other)
            first.size += second.size
            first.after = second.after
            if second.after is not None:
                second.after.before = first
            block = first
        pool.add(block)
        if self.expandable and block.after is None:
            pool.end = block

    def empty_cache(self) -> None:
        """Release all segments that have no block in use."""
        for pool in self._pools.values():
            for block in list(pool.blocks.values()):
                if block.before is None and block.after is None:
                    pool.remove(block)
                    self.reserved -= block.size
                    pool.end = None

    def _segment(self, pool: BlockPool, size: int) -> MemoryBlock:
        nbytes = (
            SMALL_SEGMENT if pool.small else LARGE_SEGMENT if size < _OWN_SEGMENT else -(-size // _ROUNDED) * _ROUNDED
        )
        self._reserve(nbytes)
        self._next += nbytes + _ROUNDED  # segments are never neighbours
        return MemoryBlock(self._next - nbytes, nbytes, pool)

    def _grow(self, pool: BlockPool, size: int) -> MemoryBlock:
        """The last block of the pool's segment, after as many pages as it lacks were mapped behind it."""
        page, last = SMALL_SEGMENT if pool.small else LARGE_SEGMENT, pool.end
        if last is not None and last.free:
            more = -(-(size - last.size) // page) * page
            self._reserve(more)
            pool.remove(last)
            last.size += more
            return last
        nbytes = -(-size // page) * page
        self._reserve(nbytes)
        self._next += 1 << 50
        block = MemoryBlock(self._next if last is None else last.address + last.size, nbytes, pool, before=last)
        if last is not None:
            last.after = block
        pool.end = block
        return block

    def _reserve(self, nbytes: int) -> None:
        if self.reserved + nbytes > self.capacity:
            self.empty_cache()
        if self.reserved + nbytes > self.capacity:
            raise OutOfMemory(f"{nbytes} bytes more than {self.reserved} of {self.capacity}")
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)


def replayed(events: Iterable[tuple[int, int, int]], allocator: CachingAllocator) -> CachingAllocator:
    """Replay events (number, bytes, stream): bytes above 0 allocate under this number, 0 frees it. Raises OutOfMemory."""
    held: dict[int, MemoryBlock] = {}
    for number, nbytes, stream in events:
        if nbytes > 0:
            held[number] = allocator.allocate(nbytes, stream)
        elif number in held:
            allocator.release(held.pop(number))
    return allocator

"""The copy of the caching allocator's rules, against what torch's own allocator did on a GPU."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from pathlib import Path

import pytest

from colonnade.proof.planner.allocator import CachingAllocator, OutOfMemory, replayed

TRACES = Path(__file__).parent / "traces"
MIB = 1 << 20


@pytest.mark.parametrize("name", ["eager", "checkpointed", "experts"])
def test_a_recorded_run_reserves_the_same_bytes(name: str) -> None:
    """Three training steps on an H200 (torch 2.11), recorded by `benchmarks/plan_record.py`, from an empty cache on."""
    trace = json.loads(lzma.decompress((TRACES / f"trace_{name}.json.xz").read_bytes()))
    actions = [trace["actions"][event[0]] for event in trace["events"]]
    reserved = sum(
        event[2] for event, action in zip(trace["events"], actions, strict=True) if action == "segment_alloc"
    )
    found = replayed(_allocations(trace["events"], actions), CachingAllocator())
    assert actions.count("segment_free") == 0
    assert found.peak_reserved == reserved
    # Of two free blocks of one size the one with the lower address is taken, and addresses are not those of the run: a block may
    # be larger than the request by another rest.
    assert found.allocated == pytest.approx(sum(segment[2] for segment in trace["segments"]), rel=1e-3)


def _allocations(events: list[list[int]], actions: list[str]) -> Iterator[tuple[int, int, int]]:
    for (_, address, size, stream), action in zip(events, actions, strict=True):
        if action == "alloc":
            yield address, size, stream
        elif action == "free_completed":
            yield address, 0, stream


def test_sizes_of_segments() -> None:
    for nbytes, segment in ((1, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (11 * MIB + 1, 12)):
        allocator = CachingAllocator()
        allocator.allocate(nbytes)
        assert allocator.reserved == segment * MIB


def test_a_block_is_split_and_joins_its_free_neighbours() -> None:
    allocator = CachingAllocator()
    first, second, third = (allocator.allocate(6 * MIB) for _ in range(3))
    assert (allocator.allocated, allocator.reserved) == (18 * MIB, 20 * MIB)
    allocator.release(first)
    allocator.release(third)
    allocator.allocate(8 * MIB)  # what is left behind the third: 6 and 2 MiB
    assert allocator.reserved == 20 * MIB
    allocator.release(second)
    allocator.allocate(12 * MIB)
    assert allocator.reserved == 20 * MIB


def test_streams_do_not_share_blocks() -> None:
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(15 * MIB, stream=1))
    allocator.allocate(15 * MIB, stream=2)
    assert allocator.reserved == 30 * MIB + 2 * MIB  # each is rounded up to 2 MiB


def test_a_full_device_releases_unused_segments_before_it_fails() -> None:
    allocator = CachingAllocator(capacity=50 * MIB)
    allocator.release(allocator.allocate(40 * MIB))
    held = allocator.allocate(44 * MIB)
    assert allocator.reserved == 44 * MIB
    with pytest.raises(OutOfMemory):
        allocator.allocate(12 * MIB)
    allocator.release(held)
    allocator.allocate(12 * MIB)


def test_expandable_segments_do_not_leave_gaps_between_segments() -> None:
    sizes = [30 * MIB, 40 * MIB]
    for expandable, reserved in ((False, 30 + 40 + 70), (True, 80)):
        allocator = CachingAllocator(expandable=expandable)
        for block in [allocator.allocate(size) for size in sizes]:
            allocator.release(block)
        allocator.allocate(sum(sizes))
        assert allocator.reserved == reserved * MIB

"""Memory of one rank and of a host's ranks, seen from one process."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from colonnade.comm.groups import GroupMemory, allocate, allocate_shared, keep_heap
from colonnade.testing import run_world


def _group(problems: list[str | None], swapped: list[int]) -> Any:
    """Rank 0: `problems` are what the other ranks say; there are two, and the other's descriptor is a copy of this one's."""

    def swap(descriptor: int) -> dict[int, int]:
        swapped.append(descriptor)
        return {1: os.dup(descriptor)}

    return SimpleNamespace(
        index=0,
        size=2,
        sockets=SimpleNamespace(swap_descriptors=swap),
        gather_objects=lambda problem: [problem, *problems],
        cannot_share=lambda problem: problems.append(f"told: {problem}"),
    )


@pytest.mark.parametrize("numel", [0, 5])
def test_every_rank_sees_what_one_writes(numel):
    before = os.listdir("/proc/self/fd")
    memory = allocate(_group([None], []), numel, torch.float32, torch.device("cpu"), True)
    assert memory.every is not None
    assert [tuple(one.shape) for one in memory.every] == [(numel,)] * 2
    assert not memory.own.any()
    memory.own.add_(1)
    assert bool(memory.every[1].all())
    assert [one.tolist() for one in memory.part(1, 3).every or ()] == [[1.0] * min(2, numel)] * 2
    del memory
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_where_one_rank_has_no_room_no_rank_shares():
    swapped: list[int] = []
    problems: list[str | None] = ["no room on rank 1", "nor on rank 2"]
    before = os.listdir("/proc/self/fd")
    assert allocate_shared(_group(problems, swapped), 5, torch.float32) == (None, "no room on rank 1")
    memory = allocate(_group(problems, swapped), 5, torch.float32, torch.device("cpu"), True)
    assert problems[-1] == "told: no room on rank 1"
    assert memory.every is None
    assert memory.own.tolist() == [0.0] * 5
    assert swapped == []
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.parametrize(
    ("shared", "sockets", "device", "expected"),
    [
        (True, True, "cpu", True),
        (False, True, "cpu", False),
        (True, False, "cpu", False),
        (True, True, "meta", False),
    ],
)
def test_memory_is_shared_on_the_host_where_ranks_are_connected_and_nobody_minds(shared, sockets, device, expected):
    group = _group([None], [])
    group.sockets = group.sockets if sockets else None
    memory = allocate(group, 3, torch.float32, torch.device(device), shared)
    assert (memory.every is not None) is expected
    assert (memory.own.shape, memory.own.device.type) == ((3,), device)


def test_memory_that_cannot_be_had_is_told_and_leaves_nothing_open():
    limits, before = resource.getrlimit(resource.RLIMIT_FSIZE), os.listdir("/proc/self/fd")
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        nothing, problem = allocate_shared(_group([None], []), 1 << 20, torch.float32)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert nothing is None
    assert (problem or "").startswith("4.0 MiB of shared memory cannot be allocated: ")
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_parts_of_memory_that_is_not_shared():
    assert GroupMemory(torch.arange(4)).part(1, 3).own.tolist() == [1, 2]
    assert GroupMemory(torch.arange(4)).part(1, 3).every is None


class _Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", *"abcdef")]


def _is_mapped(nbytes: int) -> bool:
    """Whether a block of this size comes from the system and goes back there when it is freed."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo
    before = mallinfo().hblks
    block = torch.empty(nbytes, dtype=torch.uint8)
    return bool(len(block)) and mallinfo().hblks > before


def _kept() -> tuple[bool, bool]:
    before = _is_mapped(20 << 20)
    keep_heap()
    return before, _is_mapped(31 << 20)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc learns")
def test_large_blocks_stay_on_the_heap_from_then_on():
    assert run_world(1, _kept).values == [(True, False)]

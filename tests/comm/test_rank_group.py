"""Ranks of a host: their sockets, their memory, and groups of ranks with or without a torch group."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from colonnade.comm import groups
from colonnade.comm import groups as sockets_module
from colonnade.comm.groups import (
    GroupMemory,
    HostSockets,
    RankGroup,
    allocate,
    allocate_shared,
    connect,
    host_identity,
    keep_heap,
    own_gloo,
)
from colonnade.errors import GradientError
from colonnade.testing import run_world
from tests.ranks import on_ranks


def _pair() -> list[HostSockets]:
    said: dict[int, Any] = {}
    meet = Barrier(2)

    def start(index: int) -> HostSockets:
        def gather(value: Any) -> list[Any]:
            said[index] = value
            meet.wait(timeout=10)
            return [said[0], said[1]]

        sockets, problem = connect(index, 2, 10.0, gather)
        assert sockets is not None, problem
        return sockets

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(start, range(2)))


def test_messages_and_descriptors_come_from_the_peer() -> None:
    pair = _pair()
    files = [os.memfd_create(f"rank {index}") for index in range(2)]
    try:
        for index, (sockets, file) in enumerate(zip(pair, files, strict=True)):
            os.write(file, f"of {index}".encode())
            sockets.send(f"from {index}".encode())
        assert [sockets.receive(b"own   ") for sockets in pair] == [[b"own   ", b"from 1"], [b"from 0", b"own   "]]
        with ThreadPoolExecutor(2) as threads:
            swapped = list(threads.map(HostSockets.swap_descriptors, pair, files))
        for index, got in enumerate(swapped):
            assert list(got) == [1 - index]
            assert os.pread(got[1 - index], 10, 0) == f"of {1 - index}".encode()
            os.close(got[1 - index])
    finally:
        for sockets, file in zip(pair, files, strict=True):
            sockets.close()
            os.close(file)


@pytest.mark.parametrize(("given", "seconds"), [(0.5, 1), (1.9, 1), (2.0, 2), (30.0, 30)])
def test_a_silent_peer_is_waited_for_in_whole_seconds(given, seconds):
    one, other = socket.socketpair()
    one.settimeout(0.1)  # as in the set-up
    sockets = HostSockets(0, {1: one}, given)
    assert sockets._timeout == seconds
    assert one.gettimeout() is None
    limit = one.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.calcsize("ll"))
    assert struct.unpack("ll", limit)[0] == seconds
    sockets.close()
    other.close()


class Drop:
    """A connection that gives two bytes at a time at most."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.settimeout = self.setsockopt = lambda *_: None

    def recv(self, most: int) -> bytes:
        piece, self.content = self.content[: min(2, most)], self.content[min(2, most) :]
        return piece


def test_messages_that_come_in_pieces_are_put_together_and_the_next_one_is_left():
    sockets = HostSockets(1, {2: Drop(b"abcDEF"), 0: Drop(b"uvwXYZ")}, 1.0)  # type: ignore[dict-item]
    assert sockets.receive(b"own") == [b"uvw", b"own", b"abc"]
    assert sockets.receive(b"OWN") == [b"XYZ", b"OWN", b"DEF"]
    with pytest.raises(ConnectionError) as told:
        sockets.receive(b"x")
    assert told.value.args == (0,)


def _alone(index: int, size: int, name_of_first: str, before: Any) -> tuple[HostSockets | None, str | None]:
    """`connect` as that rank, whose name `before` is given; in a thread, so that one that waits for ever fails."""
    found: list[Any] = []

    def gather(name: str) -> list[str]:
        before(name)
        return [name_of_first, name, name][:size]

    thread = threading.Thread(target=lambda: found.append(connect(index, size, 5.0, gather)), daemon=True)
    thread.start()
    thread.join(10)
    assert found, "it waits for ever"
    return found[0]


def _dial(name: str, content: bytes) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(f"\0{name}")
    connection.sendall(content)
    return connection


def test_what_a_rank_sends_after_its_number_is_a_message():
    kept: list[socket.socket] = []
    sockets, problem = _alone(0, 2, "", lambda name: kept.append(_dial(name, b"\1\0\0\0hello")))
    assert (problem, sockets is not None) == (None, True)
    assert sockets.receive(b"first") == [b"first", b"hello"]
    sockets.close()


@pytest.mark.parametrize("who", ["nobody", "silent", "stranger"])
def test_a_rank_that_does_not_say_who_it_is_in_time_or_is_another_users_is_told(monkeypatch, who):
    monkeypatch.setattr(sockets_module, "_SET_UP_SECONDS", 0.2)
    user, kept = os.getuid(), []
    if who == "stranger":
        monkeypatch.setattr(os, "getuid", lambda: user + 1)
    content = b"" if who == "silent" else b"\1\0\0\0"
    sockets, problem = _alone(0, 2, "", lambda name: who != "nobody" and kept.append(_dial(name, content)))
    assert sockets is None
    reason = f"a process of user {user} answered in place of a rank" if who == "stranger" else "timed out"
    assert problem == f"sockets between ranks of this host failed: {reason}"


def test_a_rank_that_is_left_alone_lets_go_of_those_it_has_reached(monkeypatch):
    monkeypatch.setattr(sockets_module, "_SET_UP_SECONDS", 0.2)
    name = f"colonnade-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as first:
        first.bind(f"\0{name}")
        first.listen(1)
        sockets, problem = _alone(1, 3, name, lambda name: None)
        assert (sockets, problem) == (None, "sockets between ranks of this host failed: timed out")
        connection, _ = first.accept()
        connection.settimeout(5)
        said = b"".join(iter(lambda: connection.recv(16), b""))
        assert said == (1).to_bytes(4, "little")  # its number, and then the end
        connection.close()


def test_ranks_that_can_share_memory_say_the_same_and_others_nothing(monkeypatch):
    assert host_identity() == host_identity() is not None
    for module, name in ((os, "memfd_create"), (socket, "send_fds")):
        with monkeypatch.context() as patch:
            patch.delattr(module, name)
            assert host_identity() is None


def test_a_peer_that_has_gone_is_named() -> None:
    one, other = _pair()
    other.close()
    with pytest.raises(ConnectionError) as told:
        one.receive(b"x")
    assert told.value.args == (1,)
    one.close()


# -- memory ---
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


# -- groups ---
def test_one_rank_needs_no_group_and_hears_itself():
    group = RankGroup((3,), None)
    assert group.alone
    assert (group.size, group.index) == (1, 0)
    assert group.gather_objects({"a": 1}) == [{"a": 1}]


@pytest.mark.parametrize("ranks", [(0, 1), (0, 1, 2)])
def test_several_ranks_without_a_group_are_refused(ranks):
    with pytest.raises(GradientError, match="but its process group has"):
        RankGroup(ranks, None)


def test_why_memory_is_not_shared_is_said_or_raised():
    said: list[str] = []
    group = RankGroup((3,), None, said.append)
    group.cannot_share("no room")
    assert said == ["gradients are sent by the process group, not by shared memory: no room"]
    group.share_memory(must=True)  # one rank can share with itself
    with pytest.raises(GradientError, match="shared_memory=True is not possible, because no room"):
        group.cannot_share("no room")
    assert len(said) == 1
    group.close()


@on_ranks(2)
def test_small_messages_take_the_connections_that_are_there():
    opened = []
    """Over the group where it moves CPU tensors, else over connections of their own."""
    original = groups.own_gloo
    groups.own_gloo = lambda group: opened.append(group) or original(group)
    for count, config in enumerate([dist.get_backend_config, lambda group: "cuda:nccl"]):
        dist.get_backend_config = config
        group = RankGroup((0, 1), dist.group.WORLD)
        assert len(opened) == count
        assert group.exchange(b"from %d" % dist.get_rank()) == [b"from 0", b"from 1"]
        group.signal(b"%d" % dist.get_rank())
        assert group.gather_objects({"rank": dist.get_rank()}) == [{"rank": 0}, {"rank": 1}]  # while that is under way
        assert group.collect() == [b"0", b"1"]


@on_ranks(4, timeout=30)
def test_a_rank_that_lets_go_of_its_connections_at_once_leaves_the_others_theirs():
    for _ in range(20):
        own_gloo()

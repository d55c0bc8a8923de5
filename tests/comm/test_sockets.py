"""Sockets between the ranks of a host. Two threads stand for two ranks."""

from __future__ import annotations

import os
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest

from colonnade.comm import groups as sockets_module
from colonnade.comm.groups import HostSockets, connect, host_identity


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

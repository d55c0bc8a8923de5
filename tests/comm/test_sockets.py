"""Sockets between the ranks of a host. Two threads stand for two ranks."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest

from colonnade.comm.sockets import HostSockets, connect


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


def test_a_peer_that_has_gone_is_named() -> None:
    one, other = _pair()
    other.close()
    with pytest.raises(ConnectionError) as told:
        one.receive(b"x")
    assert told.value.args == (1,)
    one.close()

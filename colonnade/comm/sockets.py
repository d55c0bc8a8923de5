"""Direct sockets between ranks of one host: they wake each other, hand over memory, and notice a death.

A message through a socket orders memory: what a rank wrote to shared memory before `send` is seen by a peer
after `receive`, on every architecture, because the kernel's queue lock is released by one and taken by the
other. The sockets are in Linux's abstract namespace, so no name exists in any file system.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from typing import Any

_SET_UP_SECONDS = 20.0
_CREDENTIALS = struct.Struct("3i")


def host_identity() -> str | None:
    """Equal for two ranks that can share memory (same boot, same network namespace); None where none can."""
    if not hasattr(os, "memfd_create") or not hasattr(socket, "send_fds"):
        return None
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')} {os.getuid()}"
    except OSError:
        return None


class HostSockets:
    """One connected socket per other rank; ranks are counted within the group.

    A peer that has gone raises ConnectionError(index), one that is silent TimeoutError(index, seconds).
    """

    def __init__(self, index: int, sockets: dict[int, socket.socket], timeout: float) -> None:
        self.index = index
        self._timeout = max(1, int(timeout))
        self._sockets = dict(sorted(sockets.items()))
        seconds = struct.pack("ll", self._timeout, 0)
        for connection in self._sockets.values():
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)

    def send(self, payload: bytes) -> None:
        """Send to every peer."""
        for index, connection in self._sockets.items():
            try:
                connection.sendall(payload)
            except OSError as error:
                raise ConnectionError(index) from error

    def receive(self, own: bytes) -> list[bytes]:
        """One message of the length of `own` from every peer, and `own` at this rank's place."""
        messages = {index: self._receive(index, len(own)) for index in self._sockets}
        messages[self.index] = own
        return [messages[index] for index in range(len(messages))]

    def swap_descriptors(self, descriptor: int) -> dict[int, int]:
        """Give `descriptor` to every peer and get theirs, by index; the caller closes what it gets."""
        for connection in self._sockets.values():
            socket.send_fds(connection, [b"m"], [descriptor])
        received = {}
        for index, connection in self._sockets.items():
            _, (received[index],), *_ = socket.recv_fds(connection, 1, 1)
        return received

    def close(self) -> None:
        for connection in self._sockets.values():
            connection.close()

    def _receive(self, index: int, size: int) -> bytes:
        data = b""
        while len(data) < size:
            try:
                piece = self._sockets[index].recv(size - len(data))
            except BlockingIOError as error:
                raise TimeoutError(index, self._timeout) from error
            except OSError as error:
                raise ConnectionError(index) from error
            if not piece:
                raise ConnectionError(index)
            data += piece
        return data


def connect(
    index: int, size: int, timeout: float, gather: Callable[[Any], list[Any]]
) -> tuple[HostSockets, None] | tuple[None, str]:
    """Connect `size` ranks of this host with each other; or say what failed. Collective."""
    name = f"colonnade-{os.urandom(16).hex()}"
    sockets: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen(size)
        listener.settimeout(_SET_UP_SECONDS)
        names = gather(name)
        try:
            for other in range(index):
                sockets[other] = _dial(names[other], index)
            while len(sockets) < size - 1:
                other, connection = _accept(listener)
                sockets[other] = connection
        except OSError as error:
            for connection in sockets.values():
                connection.close()
            return None, f"sockets between ranks of this host failed: {error}"
    return HostSockets(index, sockets, timeout), None


def _dial(name: str, index: int) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_SET_UP_SECONDS)
    connection.connect(f"\0{name}")
    _refuse_strangers(connection)
    connection.sendall(index.to_bytes(4, "little"))
    return connection


def _accept(listener: socket.socket) -> tuple[int, socket.socket]:
    connection, _ = listener.accept()
    connection.settimeout(_SET_UP_SECONDS)
    _refuse_strangers(connection)
    return int.from_bytes(connection.recv(4), "little"), connection


def _refuse_strangers(connection: socket.socket) -> None:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    if user != os.getuid():
        raise PermissionError(f"user {user} answered in place of a rank")

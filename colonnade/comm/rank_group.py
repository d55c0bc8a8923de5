"""The ranks that take part in a reduction, and the small messages between them.

Bulk data never passes here: only what ranks must agree on (are we at the same step, which gradients are
missing, does every rank see the same parameters). The messages are bytes in CPU memory whatever the device
of the gradients, so that agreeing never waits for an accelerator.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.comm.messages import gather_in_pieces
from colonnade.comm.torch_versions import (
    PrefixStore,
    all_gather_flat,
    default_store,
    gather_rows,
    gloo_all_gather,
    meeting_store,
    timeout_of,
)
from colonnade.errors import GradientError, listed

# --------------------------------------------------------------------------------------------------
# Direct sockets between ranks of one host: they wake each other, hand over memory, and notice a death.
#
# A message through a socket orders memory: what a rank wrote to shared memory before `send` is seen by a peer
# after `receive`, on every architecture, because the kernel's queue lock is released by one and taken by the
# other. The sockets are in Linux's abstract namespace, so no name exists in any file system.
# --------------------------------------------------------------------------------------------------


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
    """A connected socket per other rank; ranks are counted within the group.

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
        """A message of the length of `own` from every peer, and `own` at this rank's place."""
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


Gather = Callable[[Tensor, Tensor], Any]
"""A flat all-gather of CPU tensors, (received, own); returns work to wait for, or None where it is done."""


def start_gather(gather: Gather, size: int, payload: bytes) -> Callable[[], list[bytes]]:
    """Begin to gather bytes, of one length on all `size` ranks; the function that is returned waits for all of them."""
    received = torch.empty(size * len(payload), dtype=torch.uint8, device="cpu")
    work = gather(received, torch.frombuffer(bytearray(payload), dtype=torch.uint8))

    def wait() -> list[bytes]:
        if work is not None:
            work.wait()
        return [bytes(row) for row in received.view(size, -1).tolist()]

    return wait


def gather_json_by(gather: Gather, size: int, value: Any) -> list[Any]:
    """Every rank's JSON value, in group order."""
    found = gather_in_pieces(json.dumps(value).encode(), lambda piece: start_gather(gather, size, piece)())
    return [json.loads(content) for content in found]


class RankGroup:
    """The ranks of one group as this rank sees them. `ranks` is in group order, `index` is this rank's place."""

    def __init__(
        self, ranks: Sequence[int], group: dist.ProcessGroup | None, log: Callable[[str], None] = lambda text: None
    ) -> None:
        self.ranks = tuple(ranks) if group is None else tuple(dist.get_process_group_ranks(group))
        if set(self.ranks) != set(ranks) or (group is None and len(ranks) > 1):
            raise GradientError(f"a reduction over ranks {list(ranks)} was given the group of {list(self.ranks)}")
        self.group = group
        self.size = len(self.ranks)
        self.index = self.ranks.index(dist.get_rank()) if group is not None else 0
        self.sockets: HostSockets | None = None
        self._gather = _cpu_gather(group) if group is not None else _gather_alone
        self._answers: Callable[[], list[bytes]] | None = None
        self.under_way: deque[Any] = deque()
        """The sums over these ranks that were started and are waited for before their memory is used again."""
        self._log = log
        self._must_share = False

    @property
    def alone(self) -> bool:
        """Whether there is nobody to send to."""
        return self.size == 1

    def share_memory(self, must: bool) -> None:
        """Connect the ranks of one host, so that their memory can be shared. Collective.

        Where it cannot be done, it is logged, or an error if it `must`.
        """
        self._must_share = must
        problem = self._connect()
        if problem is not None:
            self.cannot_share(problem)

    def cannot_share(self, problem: str) -> None:
        """Say why memory is not shared; an error where it must be. On all ranks of the group alike."""
        if self._must_share:
            raise GradientError(f'shared_memory=True, but {problem}. Use "auto" to fall back by itself')
        self._log(f"gradients travel by the process group, not by shared memory: {problem}")

    def _connect(self) -> str | None:
        """Open direct sockets to all ranks, if all are on this host; else the reason why not. Collective."""
        hosts = self.gather_objects(host_identity())
        if None in hosts:
            return f"rank {self.ranks[hosts.index(None)]} runs on a system without anonymous shared memory"
        if len(set(hosts)) > 1:
            return f"ranks {listed(self.ranks)} are on {len(set(hosts))} hosts or network namespaces"
        sockets, problem = connect(self.index, self.size, timeout_of(self.group).total_seconds(), self.gather_objects)
        problems = self.gather_objects(problem)
        if any(problems):
            if sockets is not None:
                sockets.close()
            return next(text for text in problems if text)
        self.sockets = sockets
        return None

    def signal(self, payload: bytes) -> None:
        """Send `payload` (of the same length on every rank) to all; returns at once."""
        if self.sockets is None:
            self._answers = start_gather(self._gather, self.size, payload)
        else:
            self._over_sockets(lambda sockets: sockets.send(payload))
            self._answers = partial(self._over_sockets, lambda sockets: sockets.receive(payload))

    def collect(self) -> list[bytes]:
        """The payloads of all ranks in group order, after `signal`; waits for the slowest rank."""
        answers, self._answers = self._answers, None
        assert answers is not None, "collect() comes after signal()"
        return answers()

    def exchange(self, payload: bytes) -> list[bytes]:
        """Signal and collect at once."""
        self.signal(payload)
        return self.collect()

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """`payload` of every rank (same length), by the group: for what may be too long for `signal`."""
        return start_gather(self._gather, self.size, payload)()

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's JSON value, in group order. Collective, for start-up and rare events."""
        return gather_json_by(self._gather, self.size, value)

    def close(self) -> None:
        if self.sockets is not None:
            self.sockets.close()
            self.sockets = None

    def _over_sockets(self, act: Callable[[HostSockets], Any]) -> Any:
        assert self.sockets is not None
        try:
            return act(self.sockets)
        except TimeoutError as error:
            index, seconds = error.args
            raise GradientError(
                f"rank {self.ranks[index]} did not come to the gradient synchronisation of ranks "
                f"{listed(self.ranks)} within {seconds} s (the group's timeout); see where it is",
                code="C043",
            ) from error
        except ConnectionError as error:
            raise GradientError(
                f"rank {self.ranks[error.args[0]]} left during the gradient synchronisation of ranks "
                f"{listed(self.ranks)}; look at its own output for the cause",
                code="C043",
            ) from error


def own_gloo(group: dist.ProcessGroup | None = None) -> Any:
    """Connections for CPU tensors, of their own, between the ranks of `group`, or of the world. Collective."""
    on_device = torch.cuda.is_available() and "cpu:" not in dist.get_backend_config(group)
    where = torch.device("cuda", torch.cuda.current_device()) if on_device else torch.device("cpu")
    tokens = gather_rows(torch.frombuffer(bytearray(os.urandom(8)), dtype=torch.uint8).to(where), group)
    store = meeting_store(PrefixStore(f"colonnade/{bytes(tokens[0].tolist()).hex()}", default_store()), len(tokens))
    gloo = dist.ProcessGroupGloo(store, dist.get_rank(group), len(tokens), timeout_of(group))
    store.forget()
    # A rank that let go of its connections now would break those that others are still opening.
    gloo_all_gather(
        gloo, torch.empty(len(tokens), dtype=torch.uint8, device="cpu"), torch.zeros(1, dtype=torch.uint8, device="cpu")
    ).wait()
    return gloo


def gloo_beside(group: dist.ProcessGroup) -> Gather:
    """A flat all-gather of CPU tensors, by connections of its own between the ranks of `group`. Collective."""
    gloo = own_gloo(group)
    return lambda received, own: gloo_all_gather(gloo, received, own)


def _cpu_gather(group: dist.ProcessGroup) -> Gather:
    """A flat all-gather of CPU tensors over the ranks of `group`, which may be one for accelerators alone."""
    if "cpu:" in dist.get_backend_config(group):
        return lambda received, own: all_gather_flat(received, own, group=group, async_op=True)
    return gloo_beside(group)


def _gather_alone(received: Tensor, own: Tensor) -> None:
    received.copy_(own)


# --------------------------------------------------------------------------------------------------
# Flat memory of one rank, or of all ranks of a host at once.
#
# Shared memory is anonymous: it has no name in any file system, so that nothing outlives the processes however they
# end, and no mount's size limits it.
# --------------------------------------------------------------------------------------------------


HEAP_BYTES = 31 << 20


@dataclass(frozen=True, eq=False)
class GroupMemory:
    """Flat memory: this rank's, and (where it is shared) every rank's in group order."""

    own: Tensor
    every: list[Tensor] | None = None

    def part(self, start: int, stop: int) -> GroupMemory:
        """Elements [start, stop) of it."""
        every = [memory[start:stop] for memory in self.every] if self.every is not None else None
        return GroupMemory(self.own[start:stop], every)


def allocate(group: RankGroup, numel: int, dtype: torch.dtype, device: torch.device, shared: bool) -> GroupMemory:
    """Zeroed memory of `numel` elements on every rank. Collective.

    `shared`: in memory that all ranks of the group see, unless their memory cannot be shared. Where the system has no
    room for it, the group says whether that is logged or an error.
    """
    if shared and group.sockets is not None and device.type == "cpu":
        every, problem = allocate_shared(group, numel, dtype)
        if every is not None:
            return GroupMemory(every[group.index], every)
        group.cannot_share(problem or "")
    return GroupMemory(torch.zeros(numel, dtype=dtype, device=device))


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

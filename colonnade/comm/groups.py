"""Groups of ranks: their process groups in torch, small messages between their members, and their shared memory.

`ProcessGroups` has one torch process group for each distinct set of ranks. A `RankGroup` has the ranks that take part in a
reduction, and sends status between them, not gradients: whether ranks are at the same step, which gradients are missing, whether
all ranks have the same parameters. Messages are bytes in CPU memory on every device, so they never wait for an accelerator.
`GroupMemory` is memory that the ranks of one machine can share.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
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
    groups_meet,
    is_alive,
    meeting_store,
    timeout_of,
)
from colonnade.errors import ContextError, GradientError, listed

RankSet = tuple[int, ...]


class NoGroups:
    """The groups of a simulated world, which cannot communicate."""

    def group(self, ranks: Iterable[int]) -> Any:
        """Return None: torch functions do not communicate if they get None as the group."""
        return None

    def destroy(self) -> None:
        """Do nothing."""


class ProcessGroups:
    """Creates, shares and destroys process groups, keyed by the set of ranks."""

    def __init__(self, rank: int, timeout: timedelta | None = None) -> None:
        self._rank = rank
        self._timeout = timeout
        self._groups: dict[RankSet, Any] = {}
        self._made: list[Any] = []
        self._second: dict[tuple[RankSet, str], Any] = {}
        # Every set that was ever created, with or without this rank, because all ranks must skip the same ones.
        self._known: set[RankSet] = set()

    def add(self, ranks: RankSet, alone: bool) -> None:
        """Create the group of a rank set unless it exists.

        Collective over the world (with `alone`, over the set); all ranks must add sets in the same order.
        """
        if ranks not in self._known:
            self._known.add(ranks)
            world = len(ranks) == dist.get_world_size()
            group = dist.group.WORLD if world else self.create(ranks, None, alone)
            if self._rank in ranks:
                self._groups[ranks] = group

    def create(self, ranks: RankSet, backend: str | None, alone: bool) -> Any:
        """Create a process group, which `destroy` destroys. Collective over the world or, with `alone`, over the set.

        `backend` is None for the backend of the world. Ranks outside the group must call this method too, because torch numbers
        groups by count; they open no connection. With `alone` only the ranks of the group call it. torch then numbers the group by
        the number of groups that a rank has, so all ranks of the group must have created the same number of groups before.
        """
        with groups_meet(len(ranks), backend):
            group = dist.new_group(list(ranks), self._timeout, backend, use_local_synchronization=alone)
        if self._rank in ranks:
            self._made.append(group)
        return group

    def adopt(self, ranks: RankSet, group: Any, others: Iterable[RankSet]) -> None:
        """Use a process group that other code created and will destroy; `others` are the rank sets of the groups created in
        the same call."""
        self._groups[ranks] = group
        self._known.update([ranks, *others])

    def group(self, ranks: Iterable[int]) -> Any:
        """The process group of exactly these ranks."""
        key = tuple(ranks)
        if key not in self._groups:
            raise ContextError(
                f"rank {self._rank} has no process group of exactly the ranks {list(key)}. Process groups exist only "
                f"for the modes of the config. Add a mode with a group of ranks {list(key)} to the config.",
                code="C012",
            )
        return self._groups[key]

    def __contains__(self, ranks: RankSet) -> bool:
        return ranks in self._known

    def second_group(self, ranks: Iterable[int], rank_sets: Iterable[Iterable[int]], backend: str) -> Any:
        """A second group of `ranks`, with the given backend.

        The first call creates the second groups of all `rank_sets`, so it is collective over the world.
        """
        for rank_set in map(tuple, rank_sets):
            if (rank_set, backend) not in self._second:
                with groups_meet(len(rank_set), backend):
                    group = dist.new_group(list(rank_set), timeout_of(), backend)  # with the world's timeout
                self._second[rank_set, backend] = group
                if self._rank in rank_set:
                    self._made.append(group)
        return self._second[tuple(ranks), backend]

    def __len__(self) -> int:
        return len(self._groups)

    def destroy(self) -> None:
        """Destroy the groups that this object created, but not the group of the world and adopted groups."""
        for group in self._made:
            if is_alive(group):
                dist.destroy_process_group(group)


# --------------------------------------------------------------------------------------------------
# Direct sockets between ranks of one host: they wake each other, pass memory descriptors, and detect exits.
#
# A message through a socket orders memory: writes to shared memory before `send` are visible to the peer after
# `receive`, on every architecture, because one side releases the kernel's queue lock and the other takes it.
# The sockets are in Linux's abstract namespace, so no name exists in any file system.
# --------------------------------------------------------------------------------------------------


_SET_UP_SECONDS = 20.0
_CREDENTIALS = struct.Struct("3i")


def host_identity() -> str | None:
    """A text that is equal on ranks that can share memory (same host, network namespace and user); None if the system has no
    support."""
    if not hasattr(os, "memfd_create") or not hasattr(socket, "send_fds"):
        return None
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')} {os.getuid()}"
    except OSError:
        return None


class HostSockets:
    """Connected sockets to all other ranks (peers) of a group on this host, by index in the group.

    Methods raise ConnectionError(index) if a peer has exited, and TimeoutError(index, seconds) if a peer is silent.
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
        """Send `payload` to every peer."""
        for index, connection in self._sockets.items():
            try:
                connection.sendall(payload)
            except OSError as error:
                raise ConnectionError(index) from error

    def receive(self, own: bytes) -> list[bytes]:
        """Receive a message of the same length as `own` from every peer.

        Returns the messages by index, with `own` at this rank's index.
        """
        messages = {index: self._receive(index, len(own)) for index in self._sockets}
        messages[self.index] = own
        return [messages[index] for index in range(len(messages))]

    def swap_descriptors(self, descriptor: int) -> dict[int, int]:
        """Send a file descriptor to every peer, and return the descriptors of all peers, keyed by index in the group.

        The caller must close the received descriptors.
        """
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
    """Connect `size` ranks of this host by sockets. Returns (sockets, None), or (None, the problem as text).

    Collective over these ranks.
    """
    # Each rank connects to the ranks before it and accepts connections from those after it.
    name = f"colonnade-{os.urandom(16).hex()}"
    sockets: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen(size)
        listener.settimeout(_SET_UP_SECONDS)
        names = gather(name)
        try:
            for other in range(index):
                sockets[other] = connection = socket.socket(socket.AF_UNIX)
                connection.settimeout(_SET_UP_SECONDS)
                connection.connect(f"\0{names[other]}")
                _check_user(connection)
                connection.sendall(index.to_bytes(4, "little"))
            while len(sockets) < size - 1:
                connection, _ = listener.accept()
                connection.settimeout(_SET_UP_SECONDS)
                _check_user(connection)
                sockets[int.from_bytes(connection.recv(4), "little")] = connection
        except OSError as error:
            for connection in sockets.values():
                connection.close()
            return None, f"sockets between ranks of this host failed: {error}"
    return HostSockets(index, sockets, timeout), None


def _check_user(connection: socket.socket) -> None:
    """Raise if the peer process belongs to another user, because abstract socket names are visible to all users of the host."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    if user != os.getuid():
        raise PermissionError(
            f"a process of user {user} answered in place of a rank. Stop that process, or start the job again."
        )


Gather = Callable[[Tensor, Tensor], Any]
"""A flat all-gather of CPU tensors, (received, own); returns the work to wait for, or None if it is complete."""


def start_gather(gather: Gather, size: int, payload: bytes) -> Callable[[], list[bytes]]:
    """Start to gather payloads of equal length from `size` ranks.

    Returns a function that waits for the payloads and returns them.
    """
    received = torch.empty(size * len(payload), dtype=torch.uint8, device="cpu")
    work = gather(received, torch.frombuffer(bytearray(payload), dtype=torch.uint8))

    def wait() -> list[bytes]:
        if work is not None:
            work.wait()
        return [bytes(row) for row in received.view(size, -1).tolist()]

    return wait


def gather_json_by(gather: Gather, size: int, value: Any) -> list[Any]:
    """Gather the JSON value of every rank, in group order, with the function `gather`."""
    found = gather_in_pieces(json.dumps(value).encode(), lambda piece: start_gather(gather, size, piece)())
    return [json.loads(content) for content in found]


class RankGroup:
    """The ranks of a process group, with small messages between them.

    Attributes:
        ranks: The global ranks in group order.
        index: The position of this rank in the group.
        size: The number of ranks.
        group: The process group; None for a single rank.
        sockets: Direct sockets between ranks of one host, after `share_memory`.
        under_way: Reductions over these ranks that have started and must complete before their memory is reused.
    """

    def __init__(
        self, ranks: Sequence[int], group: dist.ProcessGroup | None, log: Callable[[str], None] = lambda text: None
    ) -> None:
        self.ranks = tuple(ranks) if group is None else tuple(dist.get_process_group_ranks(group))
        if set(self.ranks) != set(ranks) or (group is None and len(ranks) > 1):
            raise GradientError(
                f"the reduction is over ranks {list(ranks)}, but its process group has ranks {list(self.ranks)}. "
                f"Pass a process group with exactly ranks {list(ranks)}."
            )
        self.group = group
        self.size = len(self.ranks)
        self.index = self.ranks.index(dist.get_rank()) if group is not None else 0
        self.sockets: HostSockets | None = None
        self._gather: Gather
        if group is None:
            self._gather = _copy_own
        elif "cpu:" in dist.get_backend_config(group):
            self._gather = lambda received, own: all_gather_flat(received, own, group=group, async_op=True)
        else:  # a group for accelerators only cannot gather CPU tensors
            self._gather = separate_gloo_gather(group)
        self._answers: Callable[[], list[bytes]] | None = None
        self.under_way: deque[Any] = deque()
        self._log = log
        self._must_share = False

    @property
    def alone(self) -> bool:
        """Whether this rank is the only rank of the group."""
        return self.size == 1

    def share_memory(self, must: bool) -> None:
        """Connect the ranks by direct sockets if all ranks are on one host, so that they can share memory.

        Collective over the group.

        If the ranks cannot be connected, the reason is logged; with `must`, an error is raised.
        """
        self._must_share = must
        hosts = self.gather_objects(host_identity())
        if None in hosts:
            self.cannot_share(f"rank {self.ranks[hosts.index(None)]} runs on a system without anonymous shared memory")
            return
        if len(set(hosts)) > 1:
            self.cannot_share(f"ranks {listed(self.ranks)} are on {len(set(hosts))} hosts or network namespaces")
            return
        sockets, problem = connect(self.index, self.size, timeout_of(self.group).total_seconds(), self.gather_objects)
        # A problem on one rank stops all of them from using the sockets.
        problems = [text for text in self.gather_objects(problem) if text]
        if not problems:
            self.sockets = sockets
            return
        if sockets is not None:
            sockets.close()
        self.cannot_share(problems[0])

    def cannot_share(self, problem: str) -> None:
        """Log the reason why memory is not shared, or raise if sharing is required. To be called on all ranks of the group."""
        if self._must_share:
            raise GradientError(
                f'shared_memory=True is not possible, because {problem}. Set shared_memory="auto" to use the process '
                "group in this case."
            )
        self._log(f"gradients are sent by the process group, not by shared memory: {problem}")

    def signal(self, payload: bytes) -> None:
        """Send `payload` (equally long on every rank) to all ranks without waiting."""
        if self.sockets is None:
            self._answers = start_gather(self._gather, self.size, payload)
        else:
            self._over_sockets(lambda sockets: sockets.send(payload))
            self._answers = partial(self._over_sockets, lambda sockets: sockets.receive(payload))

    def collect(self) -> list[bytes]:
        """Receive the payloads that all ranks sent with `signal`, in group order. Waits for the slowest rank."""
        answers, self._answers = self._answers, None
        assert answers is not None, "collect() was called before signal(); call signal() first"
        return answers()

    def exchange(self, payload: bytes) -> list[bytes]:
        """Send `payload` to all ranks and return the payloads of all ranks: `signal`, then `collect`."""
        self.signal(payload)
        return self.collect()

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """Gather the payloads (of equal length) of all ranks over the process group.

        For payloads that may be too long for `signal`.
        """
        return start_gather(self._gather, self.size, payload)()

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's JSON value, in group order, for start-up and rare events. Collective over the group."""
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
                f"{listed(self.ranks)} within {seconds} s, the timeout of the process group. Read the output of rank "
                f"{self.ranks[index]}.",
                code="C043",
            ) from error
        except ConnectionError as error:
            raise GradientError(
                f"rank {self.ranks[error.args[0]]} left during the gradient synchronisation of ranks "
                f"{listed(self.ranks)}. Read the output of rank {self.ranks[error.args[0]]} for the cause.",
                code="C043",
            ) from error


def _copy_own(received: Tensor, own: Tensor) -> None:
    received.copy_(own)


def own_gloo(group: dist.ProcessGroup | None = None) -> Any:
    """New gloo connections for CPU tensors between the ranks of `group` (default: the world). Collective over these ranks."""
    # The ranks agree on a key prefix: the random token of the first rank, gathered by the group's own backend.
    on_device = torch.cuda.is_available() and "cpu:" not in dist.get_backend_config(group)
    where = torch.device("cuda", torch.cuda.current_device()) if on_device else torch.device("cpu")
    tokens = gather_rows(torch.frombuffer(bytearray(os.urandom(8)), dtype=torch.uint8).to(where), group)
    store = meeting_store(PrefixStore(f"colonnade/{bytes(tokens[0].tolist()).hex()}", default_store()), len(tokens))
    gloo = dist.ProcessGroupGloo(store, dist.get_rank(group), len(tokens), timeout_of(group))
    store.forget()
    # A barrier: a rank that closed its connections now would break connections that other ranks are still opening.
    gloo_all_gather(
        gloo, torch.empty(len(tokens), dtype=torch.uint8, device="cpu"), torch.zeros(1, dtype=torch.uint8, device="cpu")
    ).wait()
    return gloo


def separate_gloo_gather(group: dist.ProcessGroup) -> Gather:
    """A function that all-gathers flat CPU tensors over new gloo connections between the ranks of `group`.

    Collective over the group.
    """
    gloo = own_gloo(group)
    return lambda received, own: gloo_all_gather(gloo, received, own)


# --------------------------------------------------------------------------------------------------
# Flat memory of one rank, or shared by all ranks of a host.
#
# Shared memory is anonymous: it has no name in any file system, so nothing outlives the processes however they
# end, and it is not limited by the size of a mount such as /dev/shm.
# --------------------------------------------------------------------------------------------------


HEAP_BYTES = 31 << 20


@dataclass(frozen=True, eq=False)
class GroupMemory:
    """A flat tensor of this rank and, if memory is shared, the flat tensors of all ranks in group order."""

    own: Tensor
    every: list[Tensor] | None = None

    def part(self, start: int, stop: int) -> GroupMemory:
        """The same memory, limited to the elements [start, stop)."""
        every = [memory[start:stop] for memory in self.every] if self.every is not None else None
        return GroupMemory(self.own[start:stop], every)


def allocate(group: RankGroup, numel: int, dtype: torch.dtype, device: torch.device, shared: bool) -> GroupMemory:
    """Allocate zeroed memory of `numel` elements on every rank. Collective over the group.

    With `shared` the memory is visible to all ranks if they are on one host. If the system has no room for shared memory, the
    group logs or raises (`cannot_share`).
    """
    if shared and group.sockets is not None and device.type == "cpu":
        every, problem = allocate_shared(group, numel, dtype)
        if every is not None:
            return GroupMemory(every[group.index], every)
        group.cannot_share(problem or "")
    return GroupMemory(torch.zeros(numel, dtype=dtype, device=device))


def allocate_shared(group: RankGroup, numel: int, dtype: torch.dtype) -> tuple[list[Tensor], None] | tuple[None, str]:
    """Allocate a shared tensor of `numel` elements for every rank. Collective over the group.

    Returns (the tensors of all ranks in group order, None), or (None, the problem as text).
    """
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
    memory = []
    for index in range(group.size):
        mapping = mmap.mmap(descriptors[index], nbytes)  # lives as long as the tensor
        os.close(descriptors[index])
        empty = torch.empty(0, dtype=dtype, device="cpu")
        memory.append(torch.frombuffer(mapping, dtype=dtype, count=numel) if numel else empty)
    return memory, None


def keep_heap() -> None:
    """Make glibc keep freed memory for the next step.

    By default glibc returns it to the system, and the next step pays for page faults.

    With gradients in buckets the heap is almost empty after backward, and glibc would shrink it at each step. Freeing one large
    block raises glibc's dynamic threshold: blocks up to this size then stay on the heap, up to twice as much in total (32 MiB is
    the largest block that counts). No effect with other C libraries.
    """
    torch.empty(HEAP_BYTES, dtype=torch.uint8, device="cpu")


def _reserve(nbytes: int) -> tuple[int, None] | tuple[None, str]:
    """(Descriptor of anonymous memory, None), or (None, problem).

    All pages are allocated now, because running out of memory later would be a SIGBUS instead of an error.
    """
    descriptor = None
    try:
        descriptor = os.memfd_create("colonnade-shared", os.MFD_CLOEXEC)
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if descriptor is not None:
            os.close(descriptor)
        return None, f"{nbytes / 2**20:.1f} MiB of shared memory cannot be allocated: {error.strerror}"
    return descriptor, None

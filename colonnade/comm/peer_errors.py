"""Finds the rank that has exited or hangs. (gloo reports that a connection was closed, but not the rank of the peer.)

Each rank writes its host and process id to the store once (`ProcessNote`). These notes answer two questions:

- Which rank has exited (`PeerProcesses.exited`)? When a collective fails because a peer is gone, ranks check which processes of
  their own host have ended, and the first that finds one writes it to the store for the ranks of other hosts. `lost_peer_error`
  turns this into an error.
- Which rank is not running (`PeerProcesses.not_running`)? A thread of each rank writes a heartbeat every two seconds. Without it
  the rank is stopped, dead, or cut off from the store.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from colonnade.comm.groups import host_identity
from colonnade.errors import ColonnadeError, GradientError, listed

_KEY = "colonnade/process/{}"
"""The note of a rank."""
_HEARTBEAT = "colonnade/beat/{}"
"""The time of a rank's last heartbeat."""
_EXITED = "colonnade/gone"
"""The exited ranks, as found by the first rank that looked."""

BEAT_SECONDS = 2.0
"""Seconds between two heartbeats of a rank; worlds of more than 2,000 ranks have a longer interval, to limit the load on the store."""
_EXIT_SECONDS = 3.0
"""How long to wait for a process to end: a rank that has raised closes its connections a little before its process ends."""
_PAUSE = 0.05
_MOST_READ = 256
"""The number of notes to read if the launcher does not tell which ranks are on this host."""
_CLOSED = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Socket closed|Connection refused|"
    r"errors while waiting for send/recv|failed to pass monitoredBarrier|Connection was likely closed"
)


def lost_peer_error(
    error: BaseException, doing: str, processes: PeerProcesses | None, elsewhere: Callable[[], str] = lambda: ""
) -> ColonnadeError | None:
    """If `error` reports a closed connection: an error that names the exited rank, to be raised instead.

    None for any other error.

    If no exited rank is found, the message has the result of `elsewhere()`, the places of the other ranks.
    """
    if processes is None or not isinstance(error, Exception) or not _CLOSED.search(str(error)):
        return None
    if isinstance(error, ColonnadeError) and error.code == "C043":
        return None
    exited = processes.exited()
    if exited:
        lost = f"rank {processes.with_hosts(exited)} has exited"
    else:
        where = elsewhere()
        lost = f"a rank has exited or did not arrive (none on this host has exited{where and f'; {where}'})"
    kind = type(error) if isinstance(error, ColonnadeError) else GradientError
    return kind(
        f"{lost} while this rank was {doing}; the cause is in the output of the rank that exited first, not here",
        code="C043",
        ranks=exited,
    )


class ProcessNote(NamedTuple):
    """The identity of a rank's process, as the rank writes it to the store.

    Attributes:
        machine: Identifies the host and the PID namespace (containers number processes separately).
        pid: The process id.
        started: The kernel's start time of the process, because process ids are reused.
        host: The host name.
    """

    machine: str
    pid: int
    started: int | None
    host: str = ""

    @classmethod
    def of_this_process(cls) -> ProcessNote:
        try:
            space = os.readlink("/proc/self/ns/pid")
        except OSError:
            space = ""
        pid, host = os.getpid(), socket.gethostname()
        return cls(f"{host_identity() or host} {space}", pid, _start_time(pid), host)

    def has_exited(self) -> bool:
        """Whether the process, which must be on this machine, has ended or is a zombie."""
        return _start_time(self.pid) != self.started

    def why_not_running(self) -> str | None:
        """The reason why the process, which must be on this machine, is not running; None if it is running."""
        if self.has_exited():
            return "dead: its process has ended"
        try:
            with open(f"/proc/{self.pid}/stat", encoding="utf-8", errors="replace") as file:
                stopped = file.read().rpartition(")")[2].split()[0] in "Tt"
        except (OSError, IndexError):
            return None
        return "stopped (by SIGSTOP, a terminal or a debugger)" if stopped else None


def _start_time(pid: int) -> int | None:
    """The kernel's start time of a process; None if the process has ended or is a zombie. 0 without /proc."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state, *fields = file.read().rpartition(")")[2].split()
        return None if state in "ZX" else int(fields[18])
    except FileNotFoundError:
        if os.path.isdir("/proc/self"):
            return None
    except (OSError, ValueError, IndexError):
        return None
    try:
        os.kill(pid, 0)
    except OSError:
        return None
    return 0


class PeerProcesses:
    """The processes of all ranks, and their states, read from the store of the world and from the kernel of this host."""

    def __init__(self, rank: int, world_size: int, store: Any) -> None:
        """Write this rank's own note to the store of the world."""
        self._rank, self._world_size, self._store = rank, world_size, store
        self._own = ProcessNote.of_this_process()
        self._store.set(_KEY.format(rank), json.dumps(self._own))
        self._pause, self._last_heartbeat = max(BEAT_SECONDS, world_size / 1000), 0.0
        self.heartbeat(store)
        self._rank_0: ProcessNote | None = None
        self._all: list[ProcessNote] = []  # the notes of all ranks, read on first use
        self._same_host: dict[int, ProcessNote] = {}  # the notes of the other ranks of this host, read on first use

    # -- heartbeats, by the thread of `WaitWatch` -----------------------------------------------------------

    def heartbeat(self, store: Any) -> None:
        """Write a heartbeat if the last heartbeat is old enough. To be called at least once a second."""
        if time.time() - self._last_heartbeat >= self._pause:
            self._last_heartbeat = time.time()
            store.set(_HEARTBEAT.format(self._rank), f"{self._last_heartbeat:.3f}")

    @property
    def knows_rank_0(self) -> bool:
        """Whether this is rank 0 or has read the note of rank 0."""
        return self._rank == 0 or self._rank_0 is not None

    def remember_rank_0(self, store: Any = None) -> None:
        """Read the note of rank 0 now, because the store may exit together with rank 0."""
        key, store = _KEY.format(0), store if store is not None else self._store
        if self._rank_0 is None and self._rank != 0 and store.check([key]):
            self._rank_0 = ProcessNote(*json.loads(store.get(key).decode()))

    # -- exited ranks ---------------------------------------------------------------------------------------

    def exited(self, seconds: float = _EXIT_SECONDS) -> list[int]:
        """The ranks whose processes have ended.

        Waits up to `seconds` until a process ends on this host or another host reports one.
        """
        until = time.monotonic() + seconds
        while True:
            try:
                # Exited ranks that another rank has reported.
                reported = json.loads(self._store.get(_EXITED).decode()) if self._store.check([_EXITED]) else []
                found = [int(rank) for rank in reported if rank != self._rank]

                # Exited processes on this host. Only the first report is kept: ranks that exit because of the first are not
                # the cause.
                if not found:
                    if not self._same_host:
                        ranks = [rank for rank in _ranks_here(self._rank, self._world_size) if rank != self._rank]
                        keys = [_KEY.format(rank) for rank in ranks]
                        if self._store.check(keys):
                            read = [ProcessNote(*json.loads(note.decode())) for note in self._store.multi_get(keys)]
                            self._same_host = dict(zip(ranks, read, strict=True))
                    found = [
                        rank for rank, note in self._same_host.items() if self._is_here(note) and note.has_exited()
                    ]
                    if found:
                        self._store.compare_set(_EXITED, "", json.dumps(found))
            except RuntimeError:
                # The store is gone, too: rank 0 may have served it.
                note = self._rank_0
                return [0] if note is not None and self._is_here(note) and note.has_exited() else []
            if found or time.monotonic() > until:
                return found
            time.sleep(_PAUSE)

    def _is_here(self, note: ProcessNote) -> bool:
        return note.machine == self._own.machine

    # -- ranks that do not run ------------------------------------------------------------------------------

    def not_running(self, store: Any) -> dict[int, str]:
        """The ranks that have stopped sending heartbeats, each with the state of its process as text.

        Waits two seconds if a heartbeat may be late.
        """
        notes, first = self._notes_of_all(store), self._heartbeats(store, range(self._world_size))
        if not notes or not first:
            return {}
        # For processes of this host the kernel answers; for other hosts there are only heartbeats. Clocks of hosts differ, so an
        # old heartbeat only raises a suspicion: a rank is silent if its heartbeat does not change while this rank watches.
        why = {
            rank: state
            for rank, note in enumerate(notes)
            if rank != self._rank and self._is_here(note) and (state := note.why_not_running()) is not None
        }
        now = time.time()
        silent = [
            rank
            for rank, at in first.items()
            if rank != self._rank and rank not in why and not -1.0 < now - at < 2 * self._pause + 1
        ]
        if silent:
            time.sleep(self._pause + 0.5)
            again = self._heartbeats(store, silent)
            silent = [rank for rank in silent if again.get(rank) == first[rank]]
        # A host with only silent ranks is dead or cut off. All of them count as silent since the last heartbeat of the host.
        alive = {notes[rank].machine for rank in range(self._world_size) if rank not in silent and rank not in why}
        for rank in silent:
            machine = notes[rank].machine
            seconds = time.time() - max(first[other] for other in silent if notes[other].machine == machine)
            if self._is_here(notes[rank]):
                cause = (
                    "its process exists, but its Python does not run (a call that holds the GIL, or a disk that hangs)"
                )
            elif machine in alive:
                cause = "stopped or dead, while other ranks of its host send heartbeats"
            else:
                cause = "its host is dead, or cut off from the host of rank 0"
            why[rank] = f"silent for {seconds:.0f} s: {cause}"
        return dict(sorted(why.items()))

    def _notes_of_all(self, store: Any) -> list[ProcessNote]:
        if not self._all:
            keys = [_KEY.format(rank) for rank in range(self._world_size)]
            if store.check(keys):
                self._all = [ProcessNote(*json.loads(note.decode())) for note in store.multi_get(keys)]
        return self._all

    def _heartbeats(self, store: Any, ranks: Iterable[int]) -> dict[int, float]:
        ranks = list(ranks)
        keys = [_HEARTBEAT.format(rank) for rank in ranks]
        if not store.check(keys):
            return {}
        return {rank: float(text) for rank, text in zip(ranks, store.multi_get(keys), strict=True)}

    # -- ranks and hosts in words ---------------------------------------------------------------------------

    def host(self, rank: int, store: Any) -> str:
        """The name of a rank's host; empty if all ranks are on one host."""
        notes = self._notes_of_all(store)
        machines = list(dict.fromkeys(note.machine for note in notes))
        if len(machines) < 2:
            return ""
        # Different hosts may have the same name, such as "localhost".
        name = notes[rank].host
        namesakes = [
            machine for machine in machines if any(note.machine == machine and note.host == name for note in notes)
        ]
        number = namesakes.index(notes[rank].machine) + 1
        return f"{name} (number {number} of that name)" if len(namesakes) > 1 else name

    def with_hosts(self, ranks: Sequence[int]) -> str:
        """The ranks as text, each with the name of its host if that is not this host."""
        named = []
        for rank in ranks:
            key, note = _KEY.format(rank), self._rank_0 if rank == 0 else None
            with contextlib.suppress(RuntimeError):  # the store is gone, too
                if note is None and self._store.check([key]):
                    note = ProcessNote(*json.loads(self._store.get(key).decode()))
            named.append(str(rank) if note is None or self._is_here(note) else f"{rank} (host {note.host})")
        return listed(named)

    def server(self) -> str:
        """A text that names rank 0 (the server of the store) and its host. Does not access the store."""
        if self._rank_0 is None:
            return "rank 0"
        if not self._is_here(self._rank_0):
            return f"rank 0 (host {self._rank_0.host})"
        return f"rank 0 ({self._rank_0.why_not_running() or 'on this host'})"


def _ranks_here(rank: int, world_size: int) -> Iterable[int]:
    """The ranks of this host by the launcher's variables; without them, the first 256 ranks."""
    local, size = os.environ.get("LOCAL_RANK", ""), os.environ.get("LOCAL_WORLD_SIZE", "")
    if local.isdecimal() and size.isdecimal() and int(local) < int(size) <= world_size:
        first = rank - int(local)
        if first >= 0 and first + int(size) <= world_size:
            return range(first, first + int(size))
    return range(min(world_size, _MOST_READ))

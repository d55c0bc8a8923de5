"""Which rank has left, and which says nothing any more: gloo says that a connection was closed, but not whose.

Each rank writes its host and the number of its process to the store once (`ProcessNote`). From these notes follows

- who has left (`PeerProcesses.exited`): when a collective fails because a peer is gone, ranks look which processes of their own
  host have ended, and the first that finds one tells the ranks of other hosts through the store. `lost_peer_error` makes the
  error of a rank that lost its peer of that;
- who does not run (`PeerProcesses.not_running`): a thread of each rank writes the time every two seconds. A rank that does not
  is stopped, dead or cut off, and not "going on".
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

from colonnade.comm.rank_group import host_identity
from colonnade.errors import ColonnadeError, GradientError, listed

_KEY = "colonnade/process/{}"
"""The note of a rank."""
_HEARTBEAT = "colonnade/beat/{}"
"""The time at which a rank said last that it runs."""
_EXITED = "colonnade/gone"
"""The ranks that the first rank which looked has found to have ended."""

BEAT_SECONDS = 2.0
"""Seconds between two signs of life of a rank in a world of up to 1,000; the more ranks write to one store, the less often each does."""
_EXIT_SECONDS = 3.0
"""A rank that has raised closes its connections a little before its process ends."""
_PAUSE = 0.05
_MOST_READ = 256
"""Where it is not known which ranks are on this host, so many are looked at."""
_CLOSED = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Socket closed|Connection refused|"
    r"errors while waiting for send/recv|failed to pass monitoredBarrier|Connection was likely closed"
)


def lost_peer_error(
    error: BaseException, doing: str, processes: PeerProcesses | None, elsewhere: Callable[[], str] = lambda: ""
) -> ColonnadeError | None:
    """An error that names who has left, in place of one that says that a connection was closed; None for any other.

    `elsewhere` says where the other ranks are, for where it is not known who has left.
    """
    if processes is None or not isinstance(error, Exception) or not _CLOSED.search(str(error)):
        return None
    if isinstance(error, ColonnadeError) and error.code == "C043":
        return None
    exited = processes.exited()
    if exited:
        who = f"rank {processes.with_hosts(exited)} has left"
    else:
        where = elsewhere()
        who = f"a rank has left, or did not come (none of this host has ended{where and f'; {where}'})"
    kind = type(error) if isinstance(error, ColonnadeError) else GradientError
    return kind(
        f"{who} while this rank was {doing}; the cause is in the output of the rank that left first, not here",
        code="C043",
        ranks=exited,
    )


class ProcessNote(NamedTuple):
    """The process of a rank. `machine` tells hosts apart, and containers that number processes each for themselves.

    `started`: when it began, as the kernel counts it, since the number of a process may be given again.
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
        """Whether the process, one of this machine, has ended, if only by half (a zombie)."""
        return _start_time(self.pid) != self.started

    def why_not_running(self) -> str | None:
        """Why the process, one of this machine, does not go on; None where it runs."""
        if self.has_exited():
            return "dead: its process has ended"
        try:
            with open(f"/proc/{self.pid}/stat", encoding="utf-8", errors="replace") as file:
                stopped = file.read().rpartition(")")[2].split()[0] in "Tt"
        except (OSError, IndexError):
            return None
        return "stopped (by SIGSTOP, a terminal or a debugger)" if stopped else None


def _start_time(pid: int) -> int | None:
    """When the process began, as the kernel counts it; None for one that has ended, if only by half. 0 without /proc."""
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
    """The processes of all ranks, as far as the store of the world and this host's kernel tell."""

    def __init__(self, rank: int, world_size: int, store: Any) -> None:
        """Note this rank's own process in the store of the world."""
        self._rank, self._world_size, self._store = rank, world_size, store
        self._own = ProcessNote.of_this_process()
        self._store.set(_KEY.format(rank), json.dumps(self._own))
        self._pause, self._last_heartbeat = max(BEAT_SECONDS, world_size / 1000), 0.0
        self.heartbeat(store)
        self._rank_0: ProcessNote | None = None
        self._all: list[ProcessNote] = []  # of all ranks; read when somebody asks for hosts
        self._same_host: dict[
            int, ProcessNote
        ] = {}  # of the other ranks of this host; read when somebody may have left

    # -- signs of life, by the thread of `WaitWatch` --------------------------------------------------------

    def heartbeat(self, store: Any) -> None:
        """Say that this process runs. To be called at least once a second; writes when it is due."""
        if time.time() - self._last_heartbeat >= self._pause:
            self._last_heartbeat = time.time()
            store.set(_HEARTBEAT.format(self._rank), f"{self._last_heartbeat:.3f}")

    @property
    def knows_rank_0(self) -> bool:
        """Whether this is rank 0, or has read its note."""
        return self._rank == 0 or self._rank_0 is not None

    def remember_rank_0(self, store: Any = None) -> None:
        """Read the note of rank 0, which may serve the store: when rank 0 is gone, it cannot be read any more."""
        key, store = _KEY.format(0), store if store is not None else self._store
        if self._rank_0 is None and self._rank != 0 and store.check([key]):
            self._rank_0 = ProcessNote(*json.loads(store.get(key).decode()))

    # -- who has left ---------------------------------------------------------------------------------------

    def exited(self, seconds: float = _EXIT_SECONDS) -> list[int]:
        """The ranks whose processes have ended; waits a little for one to end, or for a rank of another host to say so."""
        until = time.monotonic() + seconds
        while True:
            try:
                found = self._found_by_others() or self._find_on_this_host()
            except RuntimeError:  # the store is gone too, and it may have been rank 0 that served it
                return (
                    [0]
                    if self._rank_0 is not None and self._is_here(self._rank_0) and self._rank_0.has_exited()
                    else []
                )
            if found or time.monotonic() > until:
                return found
            time.sleep(_PAUSE)

    def _found_by_others(self) -> list[int]:
        found = json.loads(self._store.get(_EXITED).decode()) if self._store.check([_EXITED]) else []
        return [int(rank) for rank in found if rank != self._rank]

    def _find_on_this_host(self) -> list[int]:
        """The ranks of this host whose processes have ended; the first rank that finds any tells all."""
        if not self._same_host:
            ranks = [rank for rank in _ranks_here(self._rank, self._world_size) if rank != self._rank]
            keys = [_KEY.format(rank) for rank in ranks]
            if not self._store.check(keys):
                return []
            read = [ProcessNote(*json.loads(note.decode())) for note in self._store.multi_get(keys)]
            self._same_host = dict(zip(ranks, read, strict=True))
        found = [rank for rank, note in self._same_host.items() if self._is_here(note) and note.has_exited()]
        if found:
            # Others that leave because of the first one are not the cause: only the first answer stays.
            self._store.compare_set(_EXITED, "", json.dumps(found))
        return found

    def _is_here(self, note: ProcessNote) -> bool:
        return note.machine == self._own.machine

    # -- who does not run -----------------------------------------------------------------------------------

    def not_running(self, store: Any) -> dict[int, str]:
        """By rank: what is known of a process that no longer says that it runs.

        Clocks of hosts differ, so that silence counts which lasts while this rank looks: waits two seconds where there is doubt.
        """
        notes, first = self._notes_of_all(store), self._heartbeats(store, range(self._world_size))
        if not notes or not first:
            return {}
        # The kernel knows of processes of this host; of others there is only their sign of life.
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
        # A host none of whose ranks is heard is dead or cut off. Its ranks fell silent with the last of them.
        alive = {notes[rank].machine for rank in range(self._world_size) if rank not in silent and rank not in why}
        for rank in silent:
            machine = notes[rank].machine
            seconds = time.time() - max(first[other] for other in silent if notes[other].machine == machine)
            if self._is_here(notes[rank]):
                cause = "its process is there, but its Python does not run (a call that holds Python's lock, or a disk that hangs)"
            elif machine in alive:
                cause = "stopped or dead, while other ranks of its host are heard"
            else:
                cause = "its host is dead, or cut off from the one of rank 0"
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
        """The name of a rank's host; empty in a world of one host, or where a rank has left no note."""
        notes = self._notes_of_all(store)
        machines = list(dict.fromkeys(note.machine for note in notes))
        if len(machines) < 2:
            return ""
        name = notes[rank].host
        alike = [each for each in machines if any(note.machine == each and note.host == name for note in notes)]
        return f"{name} (number {alike.index(notes[rank].machine) + 1} of that name)" if len(alike) > 1 else name

    def with_hosts(self, ranks: Sequence[int]) -> str:
        """The ranks, each with the name of its host, where that is another one."""
        named = []
        for rank in ranks:
            key, note = _KEY.format(rank), self._rank_0 if rank == 0 else None
            with contextlib.suppress(RuntimeError):  # the store is gone too
                if note is None and self._store.check([key]):
                    note = ProcessNote(*json.loads(self._store.get(key).decode()))
            named.append(str(rank) if note is None or self._is_here(note) else f"{rank} (host {note.host})")
        return listed(named)

    def server(self) -> str:
        """Rank 0, which serves the store, in words, without asking the store."""
        if self._rank_0 is None:
            return "rank 0"
        if not self._is_here(self._rank_0):
            return f"rank 0 (host {self._rank_0.host})"
        return f"rank 0 ({self._rank_0.why_not_running() or 'of this host'})"


def _ranks_here(rank: int, world_size: int) -> Iterable[int]:
    """The ranks of this host by the launcher's variables, or the first of the world."""
    local, size = os.environ.get("LOCAL_RANK", ""), os.environ.get("LOCAL_WORLD_SIZE", "")
    if local.isdecimal() and size.isdecimal() and int(local) < int(size) <= world_size:
        first = rank - int(local)
        if first >= 0 and first + int(size) <= world_size:
            return range(first, first + int(size))
    return range(min(world_size, _MOST_READ))

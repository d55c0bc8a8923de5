"""Which rank has left, and which says nothing any more: gloo says that a connection was closed, but not whose.

Each rank writes its host and the number of its process to the store once. When a collective fails because a peer is gone, ranks
look which processes of their own host have ended, and tell the ranks of other hosts through the store. A thread of each rank
writes the time every two seconds: who does not is stopped, dead or cut off, and not "going on".
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from colonnade.comm.rank_group import host_identity
from colonnade.errors import ColonnadeError, GradientError, listed

_KEY = "colonnade/process/{}"
_BEAT = "colonnade/beat/{}"
BEAT_SECONDS = 2.0
"""Seconds between two signs of life of a rank in a world of up to 1,000; the more ranks write to one store, the less often each does."""
_FOUND = "colonnade/gone"
_LOOK_SECONDS = 3.0
"""A rank that has raised closes its connections a little before its process ends."""
_PAUSE = 0.05
_MOST_READ = 256
"""Where it is not known which ranks are on this host, so many are looked at."""
_CLOSED = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Socket closed|Connection refused|"
    r"errors while waiting for send/recv|failed to pass monitoredBarrier|Connection was likely closed"
)


class Processes:
    """The processes of the ranks, by which those that have ended are found."""

    def __init__(self, rank: int, world_size: int, store: Any) -> None:
        """Note this rank's own process in the store of the world."""
        self._rank, self._world_size, self._store = rank, world_size, store
        self._own = _own_process()
        self._store.set(_KEY.format(rank), json.dumps([*self._own, socket.gethostname()]))
        self._everyone: list[Any] = []  # the notes of all ranks; read when somebody asks for hosts
        self._pause, self._beaten = max(BEAT_SECONDS, world_size / 1000), 0.0
        self.beat(store)
        self._first: Any = None
        self._notes: dict[int, Any] = {}  # of the other ranks of this host; read when somebody may have left

    @property
    def knows_first(self) -> bool:
        """Whether this is rank 0, or has read its note."""
        return self._rank == 0 or self._first is not None

    def remember_first(self, store: Any = None) -> None:
        """Read the note of rank 0, which may serve the store: when rank 0 is gone, it cannot be read any more."""
        key, store = _KEY.format(0), store if store is not None else self._store
        if self._first is None and self._rank != 0 and store.check([key]):
            self._first = json.loads(store.get(key).decode())

    def gone(self, seconds: float = _LOOK_SECONDS) -> list[int]:
        """The ranks whose processes have ended; waits a little for one to end, or for a rank of another host to say so."""
        until = time.monotonic() + seconds
        while True:
            try:
                found = self._told() or self._look()
            except RuntimeError:  # the store is gone too
                return [0] if self._first is not None and _has_ended(self._own, self._first) else []
            if found or time.monotonic() > until:
                return found
            time.sleep(_PAUSE)

    def beat(self, store: Any) -> None:
        """Say that this process runs. To be called at least once a second; writes when it is due."""
        if time.time() - self._beaten >= self._pause:
            self._beaten = time.time()
            store.set(_BEAT.format(self._rank), f"{self._beaten:.3f}")

    def host(self, rank: int, store: Any) -> str:
        """The name of a rank's host; empty in a world of one host, or where a rank has not told."""
        notes = self._all(store)
        spaces = list(dict.fromkeys(note[0] for note in notes))
        if len(spaces) < 2:
            return ""
        space, *_, name = notes[rank]
        alike = [each for each in spaces if any(note[0] == each and note[-1] == name for note in notes)]
        return f"{name} (number {alike.index(space) + 1} of that name)" if len(alike) > 1 else str(name)

    def quiet(self, store: Any) -> dict[int, str]:
        """By rank: what is known of a process that no longer says that it runs.

        Clocks of hosts differ, so that silence counts which lasts while this rank looks: waits two seconds where there is doubt.
        """
        notes, first = self._all(store), self._beats(store, range(self._world_size))
        if not notes or not first:
            return {}
        why = {
            rank: state
            for rank, note in enumerate(notes)
            if rank != self._rank and note[0] == self._own[0] and (state := _state(note)) is not None
        }
        now = time.time()
        doubted = [
            rank
            for rank, at in first.items()
            if rank != self._rank and rank not in why and not -1.0 < now - at < 2 * self._pause + 1
        ]
        if doubted:
            time.sleep(self._pause + 0.5)
            again = self._beats(store, doubted)
            doubted = [rank for rank in doubted if again.get(rank) == first[rank]]
        heard = {notes[rank][0] for rank in range(self._world_size) if rank not in doubted and rank not in why}
        for rank in doubted:
            space = notes[rank][0]
            seconds = time.time() - max(first[other] for other in doubted if notes[other][0] == space)
            said = f"silent for {seconds:.0f} s: "
            if space == self._own[0]:
                said += "its process is there, but its Python does not run (a call that holds Python's lock, or a disk that hangs)"
            elif space in heard:
                said += "stopped or dead, while other ranks of its host are heard"
            else:
                said += "its host is dead, or cut off from the one of rank 0"
            why[rank] = said
        return dict(sorted(why.items()))

    def with_hosts(self, ranks: Sequence[int]) -> str:
        """The ranks, each with the name of its host, where that is another one."""
        told = []
        for rank in ranks:
            key, note = _KEY.format(rank), self._first if rank == 0 else None
            with contextlib.suppress(RuntimeError):  # the store is gone too
                if note is None and self._store.check([key]):
                    note = json.loads(self._store.get(key).decode())
            is_here = note is None or note[0] == self._own[0]
            told.append(str(rank) if note is None or is_here else f"{rank} (host {note[-1]})")
        return listed(told)

    def server(self) -> str:
        """Rank 0, which serves the store, in words, without asking the store."""
        if self._first is None:
            return "rank 0"
        state = _state(self._first) if self._first[0] == self._own[0] else None
        return f"rank 0 ({f'host {self._first[-1]}' if self._first[0] != self._own[0] else state or 'of this host'})"

    def _all(self, store: Any) -> list[Any]:
        if not self._everyone:
            keys = [_KEY.format(rank) for rank in range(self._world_size)]
            if store.check(keys):
                self._everyone = [json.loads(note.decode()) for note in store.multi_get(keys)]
        return self._everyone

    def _beats(self, store: Any, ranks: Iterable[int]) -> dict[int, float]:
        ranks = list(ranks)
        keys = [_BEAT.format(rank) for rank in ranks]
        if not store.check(keys):
            return {}
        return {rank: float(text) for rank, text in zip(ranks, store.multi_get(keys), strict=True)}

    def _told(self) -> list[int]:
        """What the first rank that looked has found."""
        told = json.loads(self._store.get(_FOUND).decode()) if self._store.check([_FOUND]) else []
        return [int(rank) for rank in told if rank != self._rank]

    def _look(self) -> list[int]:
        if not self._notes:
            ranks = [rank for rank in _ranks_here(self._rank, self._world_size) if rank != self._rank]
            keys = [_KEY.format(rank) for rank in ranks]
            if not self._store.check(keys):
                return []
            read = [json.loads(note.decode()) for note in self._store.multi_get(keys)]
            self._notes = dict(zip(ranks, read, strict=True))
        found = [rank for rank, note in self._notes.items() if _has_ended(self._own, note)]
        if found:
            self._store.compare_set(_FOUND, "", json.dumps(found))
        return found


def named(
    error: BaseException, doing: str, processes: Processes | None, elsewhere: Callable[[], str] = lambda: ""
) -> ColonnadeError | None:
    """An error that names who has left, in place of one that says that a connection was closed; None for any other.

    `elsewhere` says where the other ranks are, for where it is not known who has left.
    """
    if processes is None or not isinstance(error, Exception) or not _CLOSED.search(str(error)):
        return None
    if isinstance(error, ColonnadeError) and error.code == "C043":
        return None
    found = processes.gone()
    if found:
        who = f"rank {processes.with_hosts(found)} has left"
    else:
        where = elsewhere()
        who = f"a rank has left, or did not come (none of this host has ended{where and f'; {where}'})"
    kind = type(error) if isinstance(error, ColonnadeError) else GradientError
    return kind(
        f"{who} while this rank was {doing}; the cause is in the output of the rank that left first, not here",
        code="C043",
        ranks=found,
    )


def _own_process() -> Any:
    """The host with its process numbers, the number, and when it began: a number may be given again."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    pid = os.getpid()
    return [f"{host_identity() or socket.gethostname()} {space}", pid, _began(pid)]


def _has_ended(own: Sequence[Any], other: Sequence[Any]) -> bool:
    here, (there, pid, began, *_) = own[0], other
    return bool(here == there and _began(pid) != began)


def _state(note: Sequence[Any]) -> str | None:
    """Why the process of a note, of this host, does not go on; None where it runs."""
    _, pid, began, *_ = note
    if _began(pid) != began:
        return "dead: its process has ended"
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            stopped = file.read().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return None
    return "stopped (by SIGSTOP, a terminal or a debugger)" if stopped else None


def _began(pid: int) -> int | None:
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


def _ranks_here(rank: int, world_size: int) -> Iterable[int]:
    """The ranks of this host by the launcher's variables, or the first of the world."""
    local, size = os.environ.get("LOCAL_RANK", ""), os.environ.get("LOCAL_WORLD_SIZE", "")
    if local.isdecimal() and size.isdecimal() and int(local) < int(size) <= world_size:
        first = rank - int(local)
        if first >= 0 and first + int(size) <= world_size:
            return range(first, first + int(size))
    return range(min(world_size, _MOST_READ))

"""Which rank has left: gloo says that a connection was closed, but not whose.

Each rank writes the number of its process to the store once. When a collective fails because a peer is gone, ranks look which
processes of their own host have ended, and tell the ranks of other hosts through the store.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Iterable, Sequence
from typing import Any

from colonnade.comm.sockets import host_identity
from colonnade.errors import ColonnadeError, GradientError, listed

_KEY = "colonnade/process/{}"
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
        self._store.set(_KEY.format(rank), json.dumps(self._own))
        self._first: Any = None
        self._notes: dict[int, Any] = {}  # of the other ranks of this host; read when somebody may have left

    def remember_first(self) -> None:
        """Read the note of rank 0, which may serve the store: when rank 0 is gone, it cannot be read any more."""
        key = _KEY.format(0)
        if self._first is None and self._rank != 0 and self._store.check([key]):
            self._first = json.loads(self._store.get(key).decode())

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


def named(error: BaseException, doing: str, processes: Processes | None) -> ColonnadeError | None:
    """An error that names who has left, in place of one that says that a connection was closed; None for any other."""
    if processes is None or not isinstance(error, Exception) or not _CLOSED.search(str(error)):
        return None
    if isinstance(error, ColonnadeError) and error.code == "C043":
        return None
    found = processes.gone()
    who = (
        f"rank {listed(found)} has left" if found else "a rank has left, or did not come (none of this host has ended)"
    )
    kind = type(error) if isinstance(error, ColonnadeError) else GradientError
    where = "" if doing.startswith(("in ", "outside")) else "in "
    return kind(
        f"{who} while this rank was {where}{doing}; the cause is in the output of the rank that left first, not here",
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
    (here, _, _), (there, pid, began) = own, other
    return bool(here == there and _began(pid) != began)


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

"""Joining and leaving a world, and the agreements that are made when it has just come up.

A launch, in the order of events: each rank connects to the store of rank 0 and gets the prefix of this launch there (`_store`,
`_prefix`); ranks that fail before they have joined say so at the store (`share_start_up_errors`); all wait for each other (`_meet`),
and go on together or raise the error of the rank that failed; torch makes its process group (`join_world`); the ranks compare
their configs, versions and layouts (`agree_on_layout`). At the end rank 0 leaves last (`leave_world`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from colonnade.comm.messages import Alike, agreed_errors, error_of, note_of
from colonnade.comm.torch_versions import (
    DEFAULT_TIMEOUT,
    START_UP_TIMEOUT,
    HashStore,
    PrefixStore,
    TCPStore,
    default_store,
    forget_failed_start,
    forget_meeting_stores,
    join_by,
    waiting_at_most,
)
from colonnade.comm.waits import call_within, pauses
from colonnade.context.layout import Layout
from colonnade.errors import ColonnadeError, LaunchError, LayoutError
from colonnade.version import __version__

_LEAVE_SECONDS = 3.0
_LOOK_SECONDS = 0.02  # the longest between two looks of rank 0 at who has come
_TELL_SECONDS = 10.0
_IDLE_LOOKS = 20  # a millisecond apart: a thread that hands work to another sleeps for a moment
_IDLE_SECONDS = 3.0
_PARTS = (1,) * 3
"""The parts of what `agree_on_layout` compares."""
_ARRIVALS, _ARRIVAL, _ANSWER, _ANSWERED = (
    f"colonnade/launch/{name}" for name in ("arrivals", "arrival/{}", "answer/{}", "answered")
)
"""Keys of the store at which a rank says that it has come, and rank 0 answers; see `_Answers`."""
_last_prefix = ""
"""The prefix of this process's last launch in the store."""


def join_world(
    rank: int,
    world_size: int,
    backend: str | None,
    host: str | None,
    port: int | None,
    timeout: float | None,
) -> bool:
    """Initialise torch.distributed unless it is; returns whether it was us, and so is ours to destroy."""
    atexit.unregister(_wait_for_threads)  # once, however often the process launches
    atexit.register(_wait_for_threads)
    if dist.is_initialized():
        there = (dist.get_rank(), dist.get_world_size())
        if there != (rank, world_size):
            raise LaunchError(
                f"torch.distributed is already initialised as rank {there[0]} of {there[1]}, but launch was "
                f"asked for rank {rank} of {world_size}. Leave rank and world_size out, or destroy that group first.",
                code="C021",
            )
        return False
    limit = timedelta(seconds=timeout) if timeout else DEFAULT_TIMEOUT
    store = _store(rank, world_size, host, port, limit)
    try:
        refused = _meet(store, rank, world_size, limit)
        if refused is None:
            join_by(store, backend or default_backend(), rank, world_size, limit)
    except Exception as error:
        forget_failed_start()
        raise LaunchError(
            f"rank {rank} of {world_size} could not join the world at {host}:{port} with backend "
            f"{backend or default_backend()!r}: {error}",
            code="C021",
        ) from error
    if refused is not None:
        raise refused
    return True


@contextlib.contextmanager
def share_start_up_errors(
    rank: int,
    world_size: int,
    host: str | None,
    port: int | None,
    timeout: float | None,
    ordinal: int | None = None,
) -> Iterator[None]:
    """Around what a rank does before it joins: where it fails, the others raise its error too, instead of waiting for it."""
    try:
        yield
    except Exception as error:
        if dist.is_initialized():
            # They wait in `agree_on_layout`. A rank that does not come there is lost, and this error matters more.
            with waiting_at_most(START_UP_TIMEOUT), agreed_errors(device_for(rank, ordinal), _PARTS):
                raise
        elif world_size > 1:
            seconds = min(timeout or _TELL_SECONDS, _TELL_SECONDS)
            with contextlib.suppress(Exception):  # no other rank is there to read it
                store = _store(rank, world_size, host, port, timedelta(seconds=seconds))
                _set_outcome(store, f"{rank}\n{note_of(error)}")
                _leave_store(store, rank, world_size, "refused")
        raise


def _meet(store: Any, rank: int, world_size: int, limit: timedelta) -> ColonnadeError | None:
    """Wait until all ranks are at the store, or one says there why it does not come: its error."""
    if world_size == 1:
        return None
    # A rank that was killed here and started again comes twice, and counts once.
    if store.add(f"colonnade/came/{rank}", 1) == 1 and store.add("colonnade/came", 1) == world_size:
        _set_outcome(store, "")
    until = time.monotonic() + limit.total_seconds()
    try:
        answers = _Answers.of(store, rank)
        if answers is None:
            store.wait(["colonnade/outcome"], limit)
        else:
            for pause in pauses(_LOOK_SECONDS):
                answers.give()
                if store.check(["colonnade/outcome"]):
                    break
                if time.monotonic() > until:
                    raise dist.DistStoreError("no outcome")
                time.sleep(pause)
    except dist.DistStoreError as error:
        came = store.add("colonnade/came", 0)
        raise TimeoutError(f"{came} of {world_size} ranks came within {limit.total_seconds():.0f} s") from error
    failed, _, note = store.get("colonnade/outcome").decode().partition("\n")
    if not note:
        if answers is not None:
            answers.close()
        return None
    _leave_store(store, rank, world_size, "refused")
    return error_of(note, [int(failed)], rank)


def _set_outcome(store: Any, outcome: str) -> None:
    """Write how this launch ends: "" where all ranks have come, else the rank that fails and its error. The first one counts."""
    if store.add("colonnade/decided", 1) == 1:
        store.set("colonnade/outcome", outcome)


def _leave_store(store: Any, rank: int, world_size: int, key: str) -> None:
    """Count this rank; rank 0, which may serve the store, waits a little for the others."""
    left = store.add(f"colonnade/{key}", 1)
    until = time.monotonic() + _LEAVE_SECONDS
    answers = _Answers.of(store, rank) if key == "refused" else None
    while rank == 0 and left < world_size and time.monotonic() < until:
        if answers is not None:
            answers.give()
        time.sleep(0.002)
        left = store.add(f"colonnade/{key}", 0)


def leave_world() -> None:
    """Destroy every process group of torch.distributed; rank 0, which serves the store, leaves last.

    So a rank that launches again at once cannot reach the store of the world that is going away.
    """
    if not dist.is_initialized():
        return
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with contextlib.suppress(RuntimeError):  # the store is gone where rank 0 has died
        _leave_store(default_store(), rank, world_size, "left")
    dist.destroy_process_group()
    forget_meeting_stores()


def _wait_for_threads() -> None:
    """Before Python ends: let torch's threads finish what they are at, so that the exit status is not lost.

    A thread of gloo may be the last to hold a tensor of a collective that is over, and needs Python to let go of it.
    One that comes too late, when Python has begun to end, aborts the process: "terminate called without an active
    exception". This thread sleeps and leaves Python to them; a thread that sleeps then too has nothing left to do, or
    waits for another rank, which is not waited for here.
    """
    until = time.monotonic() + _IDLE_SECONDS
    idle = 0
    while idle < _IDLE_LOOKS and time.monotonic() < until:
        time.sleep(0.001)
        idle = 0 if any(_is_busy(task) for task in Path("/proc/self/task").glob("*")) else idle + 1


def _is_busy(task: Path) -> bool:
    """Whether it is a thread of torch's that runs or could run. Without /proc none is seen."""
    try:
        # "<id> (<name>) <state> ...", with state S for one that sleeps
        name, state = (task / "stat").read_text().split("(", 1)[1].rsplit(") ", 1)
    except (OSError, IndexError, ValueError):  # it is gone
        return False
    return name.startswith("pt_") and not state.startswith("S")


def default_backend() -> str:
    """nccl where there is CUDA, gloo elsewhere."""
    return "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


def device_for(rank: int, ordinal: int | None = None) -> torch.device:
    """CUDA device `ordinal` (default: the rank), modulo devices, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", (rank if ordinal is None else ordinal) % torch.cuda.device_count())


def agree_on_layout(layout: Layout, device: torch.device, settings: Mapping[str, str] | None = None) -> None:
    """Refuse, on every rank, a layout, versions or settings that are not the same everywhere. Collective over the world."""
    with agreed_errors(device, _PARTS) as agreement:
        agreement.require(Alike("config key", settings or {}, "Launch every rank with the same config and arguments."))
        versions = {"torch": torch.__version__, "colonnade": __version__}
        agreement.require(
            Alike("the version of", versions, "Install the same versions wherever ranks run.", LaunchError)
        )
        agreement.require(
            Alike(
                "the groups of mode",
                {"layout": str(layout.digest())},
                "An initializer must return the groups of the whole world, the same on every rank; it must not depend on "
                "its own rank.",
                LayoutError,
                shown=lambda: {mode.value: repr(layout.groups(mode)) for mode in layout.modes},
            )
        )


def _store(rank: int, world_size: int, host: str | None, port: int | None, limit: timedelta) -> Any:
    """The key-value store of the rendezvous, under a prefix of its own for every launch and restart."""
    if world_size == 1 and port is None:
        return HashStore()
    if host is None or port is None:
        raise LaunchError(
            f"a world of {world_size} ranks needs the address of rank 0: pass host= and port=, set MASTER_ADDR and "
            f"MASTER_PORT, or start the script with `colonnade run --nproc {world_size} script.py`",
            code="C021",
        )
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = rank == 0 and not agent
    until = time.monotonic() + limit.total_seconds()
    while True:
        try:
            base = _within(limit, lambda: _connect(host, port, world_size, serves, limit))
            return PrefixStore(_prefix(base, rank, until), base)
        except (dist.DistNetworkError, dist.DistStoreError, RuntimeError, ValueError, TimeoutError) as error:
            # Rank 0 may be leaving a launch that failed; it comes back with a store of its own.
            if rank == 0 or not isinstance(error, _StoreLeft) or time.monotonic() > until:
                raise LaunchError(_connection_help(rank, host, port, error), code="C021") from error


class _StoreLeft(RuntimeError):
    """The store went away while this rank waited for rank 0."""


def _prefix(base: Any, rank: int, until: float) -> str:
    """The prefix of this launch: rank 0 makes it up, and gives it to each rank that says that it has come.

    The store may be older than this start of the ranks, and still hold what ranks of an earlier start have left, or
    what this process left in a launch that failed. So a rank comes with a random token, and takes an answer to this
    token only. No number that a launcher counts takes part: torchrun counts restarts on each host for itself.
    """
    global _last_prefix
    if rank == 0:
        _last_prefix = f"colonnade/{os.urandom(8).hex()}"
        return _last_prefix
    token = os.urandom(8).hex()
    try:
        number = base.add(_ARRIVALS, 1)
        base.set(_ARRIVAL.format(number), f"{token} {_last_prefix}")
        answer = _ANSWER.format(token)
        base.wait([answer], timedelta(seconds=max(0.001, until - time.monotonic())))
        _last_prefix = base.get(answer).decode()
    except dist.DistNetworkError as error:
        raise _StoreLeft(str(error)) from error
    except dist.DistStoreError as error:
        raise TimeoutError("rank 0 did not launch again") from error
    return _last_prefix


class _Answers:
    """Rank 0's part in a launch: gives its prefix to every rank that has come, also to one that comes late or again.

    Ranks that come are numbered, and each number is looked at once: what is read grows as the number of ranks. An
    answer to a token that a rank of an earlier start has left is read by nobody.
    """

    def __init__(self, base: Any, prefix: str) -> None:
        self._base, self._prefix = base, prefix
        self._seen = int(base.get(_ANSWERED).decode()) if base.check([_ANSWERED]) else 0
        self._open: list[int] = []
        """Numbers whose rank has not yet left its token: it is about to, or was killed before it could."""

    @classmethod
    def of(cls, store: Any, rank: int) -> _Answers | None:
        """Of the launch at this store, for rank 0."""
        return cls(store.underlying_store, _last_prefix) if rank == 0 and isinstance(store, PrefixStore) else None

    def give(self) -> None:
        """Answer the ranks that have come since."""
        newest = self._base.add(_ARRIVALS, 0)
        found, self._open = [*self._open, *range(self._seen + 1, newest + 1)], []
        self._seen = newest
        for number in found:
            if not self._base.check([_ARRIVAL.format(number)]):
                self._open.append(number)
                continue
            token, _, last = self._base.get(_ARRIVAL.format(number)).decode().partition(" ")
            if last != self._prefix:  # else it has read that this launch fails, and comes for the next one
                self._base.set(_ANSWER.format(token), self._prefix)

    def close(self) -> None:
        """All have come: the next launch need not look at these again."""
        self._base.set(_ANSWERED, str(self._seen))


def _connect(host: str, port: int, world_size: int, serves: bool, limit: timedelta) -> TCPStore:
    held = None
    if serves:
        one_host = os.environ.get("LOCAL_WORLD_SIZE") == str(world_size)
        # In use: perhaps by a store of this process that is still going away. Not here: an address that leads here by way of
        # another machine. Torch finds out which.
        with contextlib.suppress(OSError):
            held = listening_at(host, port, one_host)
    # multi_tenant: a store of this process that is still going away on the same port is shared, not an error.
    return TCPStore(
        host,
        port,
        world_size,
        serves,
        limit,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=held.detach() if held is not None else None,
    )


def listening_at(host: str, port: int, one_host: bool) -> socket.socket | None:
    """A socket that listens at the address that `host` stands for, and on no other interface.

    None where that address is a loopback one, and other machines may know `host` by another: the name of a machine that
    its own table of hosts calls 127.0.1.1. OSError where the address is not of this machine, or the port is in use.
    """
    found = sorted(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))  # of IPv4 first
    family, _, _, _, where = found[0]
    if not one_host and host != "localhost" and _is_loopback(str(where[0])) and not _is_loopback(host):
        return None
    held = socket.socket(family)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(where)
        held.listen(socket.SOMAXCONN)
    except OSError:
        held.close()
        raise
    return held


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:  # a name
        return False


def launchers_met(endpoint: str, limit: timedelta, connect: Callable[[], Any]) -> Any:
    """The result of `connect`; a LaunchError where a stranger holds the port of the endpoint, or nobody answers in time."""
    try:
        return _within(limit, connect)
    except Exception as error:  # torch has classes of its own for this
        raise LaunchError(
            f"the launchers of the machines cannot meet at {endpoint}: {(str(error).strip() or type(error).__name__).splitlines()[0]}. Is its port free on the "
            f"first machine, and reachable from here? Another one is given by --rdzv-endpoint, the same on every machine",
            code="C021",
        ) from error


def _within(limit: timedelta, connect: Callable[[], Any]) -> Any:
    """The result of `connect`, with a deadline of our own.

    A TCPStore client that reaches a stranger's open port waits for ever for the answer, whatever its timeout.
    """
    seconds = limit.total_seconds()
    return call_within(seconds + 1, connect, f"something listens there but gave no answer in {seconds:.0f} s")


def _connection_help(rank: int, host: str, port: int, error: Exception) -> str:
    if "EADDRINUSE" in str(error) or "in use" in str(error):
        return (
            f"port {port} on {host} is in use, so rank 0 cannot listen there. Choose another port "
            f"(`colonnade run` finds a free one by itself), or end the process that holds it."
        )
    return (
        f"rank {rank} could not reach rank 0 at {host}:{port}: {error}. Is rank 0 running, and is the address "
        f"reachable from here?"
    )

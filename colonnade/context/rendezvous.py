"""Joining and leaving a world, and the comparisons between ranks at start-up.

A launch, in order: each rank connects to the store of rank 0 and gets the key prefix of this launch (`_store`, `_prefix`). A rank
that fails before it has joined writes its error to the store (`share_start_up_errors`). All ranks wait for each other (`_meet`) and
either continue together or raise that error. torch creates its process group (`join_world`), and the ranks compare configs,
versions and layouts (`agree_on_layout`). At the end, rank 0 leaves last (`leave_world`).
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

from colonnade.comm.messages import MustMatch, agreed_errors, error_of, note_of
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
_LOOK_SECONDS = 0.02  # the longest pause of rank 0 between two polls for arrivals
_TELL_SECONDS = 10.0  # the longest attempt to tell other ranks of an error
_IDLE_LOOKS = 20  # a millisecond apart: a thread that hands work to another sleeps for a moment
_IDLE_SECONDS = 3.0
_PARTS = (1,) * 3
"""The number of parts of each comparison in `agree_on_layout`."""
_ARRIVALS, _ARRIVAL, _ANSWER, _ANSWERED = (
    f"colonnade/launch/{name}" for name in ("arrivals", "arrival/{}", "answer/{}", "answered")
)
"""Store keys by which a rank announces its arrival and rank 0 answers; see `_Answers`."""
_last_prefix = ""
"""The key prefix of this process's last launch."""


def join_world(
    rank: int,
    world_size: int,
    backend: str | None,
    host: str | None,
    port: int | None,
    timeout: float | None,
) -> bool:
    """Initialize torch.distributed unless it is already. Collective over the world.

    Returns:
        Whether this call initialized torch.distributed, so that `leave_world` should destroy it.
    """
    atexit.unregister(_wait_for_threads)  # once, however often the process launches
    atexit.register(_wait_for_threads)
    if dist.is_initialized():
        existing = (dist.get_rank(), dist.get_world_size())
        if existing != (rank, world_size):
            raise LaunchError(
                f"torch.distributed is already initialised as rank {existing[0]} of {existing[1]}, but launch was "
                f"called for rank {rank} of {world_size}. Leave rank and world_size out, or destroy the existing "
                "process group first.",
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
    """A context manager for code that runs before this rank joins the world.

    An error in the block is also raised on the other ranks, which would otherwise wait.
    """
    try:
        yield
    except Exception as error:
        if dist.is_initialized():
            # The other ranks wait in `agree_on_layout`, which starts with the same collective as this block.
            with waiting_at_most(START_UP_TIMEOUT), agreed_errors(device_for(rank, ordinal), _PARTS):
                raise
        elif world_size > 1:
            seconds = min(timeout or _TELL_SECONDS, _TELL_SECONDS)
            with contextlib.suppress(Exception):  # rank 0 may not be running; the error of this rank matters more
                store = _store(rank, world_size, host, port, timedelta(seconds=seconds))
                _set_outcome(store, f"{rank}\n{note_of(error)}")
                _leave_store(store, rank, world_size, "refused")
        raise


def _meet(store: Any, rank: int, world_size: int, limit: timedelta) -> ColonnadeError | None:
    """Wait until all ranks have connected to the store; if a rank has failed instead, return its error."""
    if world_size == 1:
        return None
    # A rank that was killed here and restarted arrives twice but counts once.
    if store.add(f"colonnade/came/{rank}", 1) == 1 and store.add("colonnade/came", 1) == world_size:
        _set_outcome(store, "")
    until = time.monotonic() + limit.total_seconds()
    try:
        answers = _Answers.of(store, rank)
        if answers is None:
            store.wait(["colonnade/outcome"], limit)
        else:
            for pause in pauses(_LOOK_SECONDS):
                answers.answer_arrivals()
                if store.check(["colonnade/outcome"]):
                    break
                if time.monotonic() > until:
                    raise dist.DistStoreError("no outcome")
                time.sleep(pause)
    except dist.DistStoreError as error:
        came = store.add("colonnade/came", 0)
        raise TimeoutError(f"{came} of {world_size} ranks connected within {limit.total_seconds():.0f} s") from error
    failed, _, note = store.get("colonnade/outcome").decode().partition("\n")
    if not note:
        if answers is not None:
            answers.close()
        return None
    _leave_store(store, rank, world_size, "refused")
    return error_of(note, [int(failed)], rank)


def _set_outcome(store: Any, outcome: str) -> None:
    """Write the outcome of this launch: "" if all ranks have arrived, else a failed rank and its error. The first call decides."""
    if store.add("colonnade/decided", 1) == 1:
        store.set("colonnade/outcome", outcome)


def _leave_store(store: Any, rank: int, world_size: int, key: str) -> None:
    """Count this rank as leaving. Rank 0, which may serve the store, waits up to three seconds for the other ranks."""
    left = store.add(f"colonnade/{key}", 1)
    until = time.monotonic() + _LEAVE_SECONDS
    answers = _Answers.of(store, rank) if key == "refused" else None
    while rank == 0 and left < world_size and time.monotonic() < until:
        if answers is not None:
            answers.answer_arrivals()
        time.sleep(0.002)
        left = store.add(f"colonnade/{key}", 0)


def leave_world() -> None:
    """Destroy all process groups of torch.distributed. Rank 0, which serves the store, leaves last.

    Because of this order, a rank that launches again at once cannot connect to the store of the old world.
    """
    if not dist.is_initialized():
        return
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with contextlib.suppress(RuntimeError):  # the store has gone with a dead rank 0
        _leave_store(default_store(), rank, world_size, "left")
    dist.destroy_process_group()
    forget_meeting_stores()


def _wait_for_threads() -> None:
    """At exit, let torch's threads finish, so that the process keeps its exit status.

    A gloo thread may hold the last reference to a tensor of a completed collective, and needs the GIL to release it. If it asks
    for the GIL after Python has begun to finalize, the process aborts: "terminate called without an active exception".
    """
    # This thread sleeps, which leaves the GIL to the others, until all of torch's threads have been asleep for a while: they are
    # then idle, or wait for another rank. Without /proc no thread is seen.
    until = time.monotonic() + _IDLE_SECONDS
    idle = 0
    while idle < _IDLE_LOOKS and time.monotonic() < until:
        time.sleep(0.001)
        idle = 0 if any(_is_busy(task) for task in Path("/proc/self/task").glob("*")) else idle + 1


def _is_busy(task: Path) -> bool:
    """Whether this is a thread of torch that is not sleeping."""
    try:
        # "<id> (<name>) <state> ...", with state S for a sleeping thread
        name, state = (task / "stat").read_text().split("(", 1)[1].rsplit(") ", 1)
    except (OSError, IndexError, ValueError):  # the thread has ended
        return False
    return name.startswith("pt_") and not state.startswith("S")


def default_backend() -> str:
    """The default backend: "nccl" with CUDA, else "gloo"."""
    return "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


def device_for(rank: int, ordinal: int | None = None) -> torch.device:
    """CUDA device number `ordinal` (default: the rank) modulo the number of devices; the CPU without CUDA."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", (rank if ordinal is None else ordinal) % torch.cuda.device_count())


def agree_on_layout(layout: Layout, device: torch.device, settings: Mapping[str, str] | None = None) -> None:
    """Raise on every rank if layouts, versions or settings differ between ranks. Collective over the world."""
    with agreed_errors(device, _PARTS) as agreement:
        agreement.require(
            MustMatch("config key", settings or {}, "Launch every rank with the same config and arguments.")
        )
        versions = {"torch": torch.__version__, "colonnade": __version__}
        agreement.require(MustMatch("the version of", versions, "Install the same versions on all hosts.", LaunchError))
        agreement.require(
            MustMatch(
                "the groups of mode",
                {"layout": str(layout.digest())},
                "An initializer must return the groups of all ranks, equal on every rank; the result must not depend on the "
                "initializer's own rank.",
                LayoutError,
                shown=lambda: {mode.value: repr(layout.groups(mode)) for mode in layout.modes},
            )
        )


def _store(rank: int, world_size: int, host: str | None, port: int | None, limit: timedelta) -> Any:
    """The key-value store of the rendezvous, with a key prefix of its own for every launch and restart."""
    if world_size == 1 and port is None:
        return HashStore()
    if host is None or port is None:
        raise LaunchError(
            f"a world of {world_size} ranks needs the address of rank 0. Start the script with `colonnade run "
            f"--nproc {world_size} script.py`, set MASTER_ADDR and MASTER_PORT, or pass host= and port=.",
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
            # This rank may have reached the store of a failed launch that rank 0 is just leaving. Rank 0 comes back with a new
            # store, so the connection is tried again.
            if rank != 0 and isinstance(error, _StoreLeft) and time.monotonic() <= until:
                continue
            text = (
                f"rank {rank} could not reach rank 0 at {host}:{port}: {error}. Is rank 0 running, and is the address "
                f"reachable from here?"
            )
            if "EADDRINUSE" in str(error) or "in use" in str(error):
                text = (
                    f"port {port} on {host} is in use, so rank 0 cannot listen on it. Choose another port "
                    "(`colonnade run` finds a free one automatically), or end the process that uses it."
                )
            raise LaunchError(text, code="C021") from error


class _StoreLeft(RuntimeError):
    """The store went away while this rank waited for rank 0."""


def _prefix(base: Any, rank: int, until: float) -> str:
    """The key prefix of this launch, chosen by rank 0 and sent to each arriving rank.

    The store may be older than this start of the ranks and still have keys of an earlier start, or of a failed launch of this
    process. A rank therefore announces itself with a random token and accepts only an answer to this token. Restart counters of
    the launcher cannot be used, because torchrun counts restarts separately on each host.
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
    """Rank 0's side of a launch: answers every arriving rank with the prefix, also a late or restarted one.

    Arrivals are numbered, and each number is processed once, so the number of reads grows linearly with the ranks. Answers to
    tokens from an earlier start are never read.
    """

    def __init__(self, base: Any, prefix: str) -> None:
        self._base, self._prefix = base, prefix
        self._seen = int(base.get(_ANSWERED).decode()) if base.check([_ANSWERED]) else 0
        self._open: list[int] = []
        """Numbers whose rank has not written its token yet: the rank is about to, or was killed before it could."""

    @classmethod
    def of(cls, store: Any, rank: int) -> _Answers | None:
        """The object that answers ranks for the launch at this store, on rank 0; None on other ranks."""
        return cls(store.underlying_store, _last_prefix) if rank == 0 and isinstance(store, PrefixStore) else None

    def answer_arrivals(self) -> None:
        """Answer the ranks that have arrived since the last call."""
        newest = self._base.add(_ARRIVALS, 0)
        found, self._open = [*self._open, *range(self._seen + 1, newest + 1)], []
        self._seen = newest
        for number in found:
            if not self._base.check([_ARRIVAL.format(number)]):
                self._open.append(number)
                continue
            token, _, last = self._base.get(_ARRIVAL.format(number)).decode().partition(" ")
            # A rank that had this prefix already has read that this launch failed, and is waiting for the next one.
            if last != self._prefix:
                self._base.set(_ANSWER.format(token), self._prefix)

    def close(self) -> None:
        """Let the next launch skip the numbers of this launch. Called after all ranks have arrived."""
        self._base.set(_ANSWERED, str(self._seen))


def _connect(host: str, port: int, world_size: int, serves: bool, limit: timedelta) -> TCPStore:
    """Connect to the store at an address, and serve it there if `serves`."""
    listener = None
    if serves:
        one_host = os.environ.get("LOCAL_WORLD_SIZE") == str(world_size)
        # Errors are left to torch: the port may be in use by a closing store of this process, and an address that is not of this
        # host may be forwarded to it.
        with contextlib.suppress(OSError):
            listener = listening_at(host, port, one_host)
    # multi_tenant: a store of this process that is still closing on the same port is shared instead of an error.
    return TCPStore(
        host,
        port,
        world_size,
        serves,
        limit,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach() if listener is not None else None,
    )


def listening_at(host: str, port: int, one_host: bool) -> socket.socket | None:
    """Open a socket that listens only on the network interface with the address of `host`.

    Returns:
        The socket; None if `host` resolves to a loopback address here but other hosts may resolve it differently, as with a
        host name that /etc/hosts maps to 127.0.1.1.

    Raises:
        OSError: The address is not of this host, or the port is in use.
    """
    found = sorted(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))  # IPv4 first
    family, _, _, _, address = found[0]
    if not one_host and host != "localhost" and _is_loopback(str(address[0])) and not _is_loopback(host):
        return None
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(socket.SOMAXCONN)
    except OSError:
        listener.close()
        raise
    return listener


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:  # a name
        return False


def launchers_met(endpoint: str, limit: timedelta, connect: Callable[[], Any]) -> Any:
    """Return the result of `connect()`.

    Raises LaunchError if another program uses the port of the endpoint, or nothing answers within `limit`.
    """
    try:
        return _within(limit, connect)
    except Exception as error:  # torch raises classes of its own
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise LaunchError(
            f"the launchers of the machines cannot connect at {endpoint}: {cause}. Check that the port is free on "
            "the first machine and reachable from this one. To use another port, pass the same --rdzv-endpoint on "
            "every machine.",
            code="C021",
        ) from error


def _within(limit: timedelta, connect: Callable[[], Any]) -> Any:
    """The result of `connect`, with a deadline.

    A TCPStore client that reaches the port of another program waits for an answer forever, whatever its own timeout.
    """
    seconds = limit.total_seconds()
    return call_within(seconds + 1, connect, f"a process listens there but did not answer within {seconds:.0f} s")

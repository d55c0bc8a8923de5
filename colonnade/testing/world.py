"""run_world: start a world of real processes, watch it until every rank has reported, and leave nothing behind.

`run_world` writes the pickled call into a private folder, starts one process for each rank (`_World.start`; what happens inside it is
`rank.rank_main`), and watches them (`_World.watch`). A rank sends short messages over its link: LOADED, JOINED, REPORTED. Its
report is a file, so that the parent never blocks on a rank that dies while it writes. A rank then waits for the message to
leave: peers may still use its sockets. The other half of this file is what a world needs before its first process.
"""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkContext, ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import torch

from colonnade.errors import LaunchError
from colonnade.launching.outcome import Outcome, WorldError, WorldResult
from colonnade.testing.rank import GUARD, JOINED, LOADED, REPORTED, STACK_SIGNAL, WorldSpec, rank_main

# How long the other ranks may take to fail by themselves once one has, and to exit once all are done.
_GRACE = 3.0
# Collectives give up before the deadline, so that they say so in a traceback.
_GROUP_SHARE = 0.75
_LONGEST_LOG = 1 << 20
_SHOW_SECONDS = 0.1

_NOT_RETURNED = "the function did not return"
_NOT_REACHED = 'the function was not reached; does the script start its work under `if __name__ == "__main__":`?'

# Imported once by the fork server instead of by every rank. On 2 cores with torch 2.13, `torch._dynamo` costs
# 1 s here and saves each world of 4 about 2.2 s at its first DDP or functional collective; the other two of torch
# cost 0.2 s each and save 0.1 s. The library itself costs 0.4 s and saves each world of 4 as much.
_PRELOAD = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining",
    "colonnade._launch",
    "colonnade.checkpoint.manager",
    "colonnade.engine.build",
    "colonnade.testing.rank",
    "colonnade.testing.truth",
    "colonnade.trainer",
)
_PRELOAD_UNDER_PYTEST = ("pytest", "hypothesis")


def run_world(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 60,
    check: bool = True,
    backend: str | None = "gloo",
    env: Mapping[str, str | None] | None = None,
    show: bool = False,
    **kwargs: Any,
) -> WorldResult:
    """Run `fn(*args, **kwargs)` on `n` processes at once and return what each rank returned.

    `fn` is a module-level function; arguments and return values travel by value. The default process group of
    torch's `backend` exists when `fn` starts; with None only RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT are set, and the port is free. With "nccl" the current device of rank r is GPU
    r modulo their number. There may be more ranks than GPUs, so one GPU can test NCCL between several ranks: each
    rank then gets an NCCL_HOSTID of its own, with NCCL_NET=Socket, NCCL_SOCKET_IFNAME=lo and NCCL_IB_DISABLE=1
    (also with None, for a `launch` in `fn`).
    `env` is laid over this process's environment and the harness's defaults (one OMP thread, a TMPDIR that goes with
    the world, and TORCH_DISTRIBUTED_DEBUG=DETAIL unless the environment sets it; DDP of torch 2.13 crashes under it on
    gloo: set it OFF there); None takes a variable away. After `timeout` seconds the stacks of all ranks are taken and
    the world is killed. With `check`, a failing rank raises `WorldError`. With `show`, what rank 0 prints is
    shown as it comes. A script that calls this needs `if __name__ == "__main__":`, as for any multiprocessing.
    """
    if n < 1:
        raise LaunchError(f"A world of {n} ranks cannot be run: give at least 1.", code="C101")
    if timeout <= 0:
        raise LaunchError(f"timeout={timeout} leaves a world no time to run: give seconds above 0.", code="C101")
    check_keywords(fn, kwargs)
    if backend is not None and "nccl" in backend and not torch.cuda.device_count():
        raise LaunchError(f"backend={backend!r} needs a GPU and torch finds none. Give backend='gloo'.", code="C024")

    # What is wrong with the call is said before a process is started.
    call, context, started = packed(fn, args, kwargs), context_for(fn), time.monotonic()
    with private_folder() as folder, loopback_socket(listening=backend is not None) as held:
        port = held.getsockname()[1]
        spec = WorldSpec(n, folder, environments(n, folder, port, env), backend, _GROUP_SHARE * timeout)
        spec.call.write_bytes(call)
        world = _World(spec, _Shown([spec.file(0, "stdout"), spec.file(0, "stderr")]) if show else None)
        # Every process is gone when this returns, whatever happens in between.
        try:
            world.start(context, held)
            outcomes = world.watch(timeout)
        finally:
            world.end()
        result = WorldResult(
            outcomes=outcomes,
            stdout=tuple(_text(spec.file(rank, "stdout")) for rank in range(n)),
            stderr=tuple(_without_guard(_text(spec.file(rank, "stderr"))) for rank in range(n)),
            seconds=time.monotonic() - started,
        )
    if check and not result.ok:
        raise WorldError(result)
    return result


# --- The processes of a world ---


@dataclass
class _World:
    """The processes of one world and what became of them so far."""

    spec: WorldSpec
    shown: _Shown | None = None
    ranks: list[_Rank] = field(default_factory=list)
    outcomes: dict[int, Outcome] = field(default_factory=dict)

    def start(self, context: ForkContext | ForkServerContext, listener: socket.socket) -> None:
        """Start all ranks; only rank 0 gets the listening socket of the store."""
        for rank in range(self.spec.world_size):
            here, there = context.Pipe()
            serves = rank == 0 and self.spec.backend is not None
            arguments = (rank, self.spec, there, listener if serves else None)
            process = context.Process(target=rank_main, args=arguments, name=f"colonnade-rank-{rank}")
            self.ranks.append(_Rank(process, here))
            process.start()
            there.close()

    def watch(self, timeout: float) -> tuple[Outcome, ...]:
        """Collect one outcome per rank; stop what still runs at the deadline or a grace after a failure."""
        deadline = stop_at = time.monotonic() + timeout
        while self._running() and time.monotonic() < stop_at:
            self._take_events(min(stop_at - time.monotonic(), _SHOW_SECONDS if self.shown else timeout))
            if self.shown is not None:
                self.shown.copy()
            failed = [rank for rank, outcome in self.outcomes.items() if not outcome.ok]
            running = [self.ranks[rank] for rank in self._running()]
            # A failed rank leaves, so that the collectives of its peers fail now. Not while a peer still joins the group that it
            # is in: that one would fail in joining, and never reach the function.
            all_joined = all(rank.joined for rank in running)
            for rank in failed:
                if all_joined or not self.ranks[rank].joined:
                    self.ranks[rank].dismiss()
            # The others get a grace to fail by themselves, which starts when all have imported the function: on a busy machine
            # some may not have begun.
            if failed and stop_at == deadline and all(rank.loaded for rank in running):
                stop_at = min(deadline, time.monotonic() + _GRACE)
        self._stop_running("timeout" if stop_at == deadline else "ended")
        if all(outcome.ok for outcome in self.outcomes.values()):
            self._dismiss_all()
        return tuple(self.outcomes[rank] for rank in range(self.spec.world_size))

    def end(self) -> None:
        """Kill whatever is left of the ranks and their children, and forget them."""
        for rank in self.ranks:
            rank.link.close()
            if rank.process.pid is not None:
                rank.signal(signal.SIGKILL)
                rank.process.join()
                rank.process.close()
        self.ranks.clear()

    def _running(self) -> list[int]:
        return [rank for rank in range(self.spec.world_size) if rank not in self.outcomes]

    def _take_events(self, seconds: float) -> None:
        """Wait for reports and deaths; a report made before the death counts, so it is looked for first."""
        running = self._running()
        wait([source for rank in running for source in self.ranks[rank].sources()], max(0.0, seconds))
        for rank in running:
            if self.ranks[rank].read_messages():
                report = pickle.loads(self.spec.file(rank, "report").read_bytes())
                self.outcomes[rank] = Outcome(rank=rank, **report)
            elif self.ranks[rank].process.exitcode is not None:
                self.outcomes[rank] = self._exited(rank, self.ranks[rank].process.exitcode or 0)

    def _exited(self, rank: int, code: int) -> Outcome:
        when = _NOT_RETURNED if self.spec.file(rank, "stack").exists() else _NOT_REACHED
        return Outcome.of_exit(rank, code, time.monotonic(), when)

    def _stop_running(self, kind: Literal["timeout", "ended"]) -> None:
        """Take the stacks of the ranks that still run and kill them."""
        running = self._running()
        for rank in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.ranks[rank].process.pid or 0, STACK_SIGNAL)
        stacks = _full_texts([self.spec.file(rank, "stack") for rank in running])
        for rank, text in zip(running, stacks, strict=True):
            stack = _without_guard(text) or _why_no_stack(self.ranks[rank].process.pid)
            self.outcomes[rank] = Outcome(rank, kind, time.monotonic(), stack=stack)
            self.ranks[rank].signal(signal.SIGKILL)

    def _dismiss_all(self) -> None:
        """Let every rank leave, and give it time to exit by itself."""
        for rank in self.ranks:
            rank.dismiss()
        end = time.monotonic() + _GRACE
        for rank in self.ranks:
            rank.process.join(max(0.0, end - time.monotonic()))


@dataclass
class _Rank:
    """One process of the world, seen from the parent.

    `is_linked` is false once its end of the link is closed; `loaded` is true once it has imported the function, `joined` once
    it is in the group, and `dismissed` once it was sent the message to leave.
    """

    process: BaseProcess
    link: Connection[Any, Any]
    is_linked: bool = True
    loaded: bool = False
    joined: bool = False
    dismissed: bool = False

    def sources(self) -> list[Any]:
        return [self.process.sentinel, *([self.link] if self.is_linked else [])]

    def read_messages(self) -> bool:
        """Take in what the rank has sent; whether it has left its report."""
        try:
            while self.is_linked and self.link.poll():
                message = self.link.recv_bytes()
                self.loaded = self.loaded or message == LOADED
                self.joined = self.joined or message == JOINED
                if message == REPORTED:
                    return True
        except (EOFError, OSError):
            self.is_linked = False
        return False

    def dismiss(self) -> None:
        """Send the rank the message that it may leave, once."""
        if not self.dismissed:
            self.dismissed = True
            with contextlib.suppress(OSError):
                self.link.send_bytes(b"leave")

    def signal(self, number: int) -> None:
        """Signal the process and its process group, which holds the children it left."""
        for send in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                send(self.process.pid or 0, number)


@dataclass
class _Shown:
    """What a rank has printed, shown in this process too, in a notebook as well."""

    files: list[Path]
    read: dict[Path, int] = field(default_factory=dict)

    def copy(self) -> None:
        for file in self.files:
            if file.exists():
                with file.open("rb") as log:
                    log.seek(self.read.get(file, 0))
                    whole, newline, _ = log.read().rpartition(b"\n")
                if newline:
                    self.read[file] = self.read.get(file, 0) + len(whole) + 1
                    sys.stdout.write(whole.decode("utf-8", "replace") + "\n")
                    sys.stdout.flush()


def _full_texts(files: list[Path], seconds: float = 2.0) -> list[str]:
    """Read files that are being written once all have text and have stopped growing, or time is up."""
    end, before = time.monotonic() + seconds, [-1] * len(files)
    while time.monotonic() < end:
        sizes = [file.stat().st_size if file.exists() else 0 for file in files]
        if sizes == before and all(sizes):
            break
        before = sizes
        time.sleep(0.05)
    return [_text(file) for file in files]


def _without_guard(stack: str) -> str:
    """Drop the harness's own thread from a dump of all threads."""
    return "\n\n".join(thread for thread in stack.split("\n\n") if GUARD not in thread)


def _why_no_stack(pid: int | None) -> str:
    """Say in which state the process is; a stopped one (T) cannot answer the request for its stacks."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "no stack: the process is gone"
    return "no stack: the process is stopped" if state in "Tt" else f"no stack: process state {state}"


def _text(path: Path) -> str:
    """Return the end of a log, of a length that a report can hold in memory."""
    if not path.exists():
        return ""
    with path.open("rb") as log:
        log.seek(max(0, path.stat().st_size - _LONGEST_LOG))
        return log.read().decode("utf-8", errors="replace")


# --- Before the first process: how it starts, the call, the folder, the port, the settings ---


def start_server() -> ForkServerContext:
    """Start the fork server if it does not run yet, without waiting for its imports; return its context."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOAD, *(_PRELOAD_UNDER_PYTEST if "pytest" in sys.modules else ())])
    forkserver.ensure_running()
    return context


def context_for(fn: Callable[..., Any]) -> ForkContext | ForkServerContext:
    """Return the start method for `fn`: the fork server, or plain fork for a function typed at a prompt.

    Such a function exists in this process only, in a `__main__` that no other process could import.
    """
    source = getattr(sys.modules["__main__"], "__file__", None)
    typed_in = fn.__module__ == "__main__" if source is None else not Path(source).exists()
    if typed_in and torch.cuda.is_initialized():
        raise LaunchError(
            "this process has used CUDA, so it cannot be copied for the ranks: start anew, and use the GPU only inside "
            "the function that the ranks run",
            code="C101",
        )
    return multiprocessing.get_context("fork") if typed_in else start_server()


def check_keywords(fn: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse `init=`, as `backend=` was called once, unless the function names such a parameter: it would be passed on to it."""
    if "init" not in kwargs:
        return
    with contextlib.suppress(TypeError, ValueError):  # some callables have no signature
        if "init" in inspect.signature(fn).parameters:
            return
    raise LaunchError(
        f"run_world has no keyword init (it got init={kwargs['init']!r}): it is called backend now. Pass backend={kwargs['init']!r}, "
        f"or give {getattr(fn, '__qualname__', fn)} a parameter init if it is meant for that function.",
        code="C115",
    )


def packed(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Return the call as bytes, or say what cannot travel and what to do.

    Plain pickle on purpose: multiprocessing's own would share the memory of tensors between the ranks.
    """
    name = getattr(fn, "__qualname__", repr(fn))
    if "<lambda>" in name or "<locals>" in name:
        raise LaunchError(
            f"run_world cannot send {name} to other processes: it is a lambda or defined inside a function. "
            "Move it to module level and pass what it needs as arguments.",
            code="C101",
        )
    for what, thing in (
        (name, fn),
        *((f"argument {i} of {name}", arg) for i, arg in enumerate(args)),
        *((f"argument {key!r} of {name}", arg) for key, arg in kwargs.items()),
    ):
        try:
            pickle.dumps(thing)
        except Exception as error:
            raise LaunchError(
                f"run_world cannot send {what} to other processes ({type(error).__name__}: {error}). "
                "Pass a module-level function and plain data or tensors; build the rest inside the function.",
                code="C101",
            ) from error
    return pickle.dumps((fn, args, kwargs))


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """Make a folder only this user can read, with the ranks' TMPDIR `tmp` in it; remove it at the end."""
    folder = Path(tempfile.mkdtemp(prefix="colonnade-world-"))
    (folder / "tmp").mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def loopback_socket(listening: bool) -> Iterator[socket.socket]:
    """Hold a free loopback port until the end of the world.

    Listening, it is handed to rank 0's store, so no port is ever chosen twice and nothing listens on other
    interfaces. Bound only, it reserves the port: a rank may listen there (both sides reuse the address),
    nobody else is given it.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        if listening:
            held.listen(socket.SOMAXCONN)
        yield held


def environments(n: int, folder: Path, port: int, env: Mapping[str, str | None] | None) -> tuple[dict[str, str], ...]:
    """Return each rank's environment: this process's, over it our defaults, over them `env` (None removes)."""
    shared = {
        **{name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")},
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "TORCH_DISTRIBUTED_DEBUG": os.environ.get("TORCH_DISTRIBUTED_DEBUG", "DETAIL"),
        "TMPDIR": str(folder / "tmp"),
    }
    if sys.platform == "linux":
        shared.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return tuple(
        {
            name: value
            for name, value in {**shared, **nccl, **(env or {}), "RANK": str(rank), "LOCAL_RANK": str(rank)}.items()
            if value is not None
        }
        for rank, nccl in enumerate(nccl_environments(n))
    )


def nccl_environments(n: int) -> list[dict[str, str]]:
    """Return, for each of `n` ranks, what NCCL needs where they share GPUs; empty where none is shared.

    NCCL refuses two ranks on one device of one host. So each rank names a host of its own, and they talk over
    loopback sockets, as hosts without a faster network would.
    """
    if not 0 < torch.cuda.device_count() < n:
        return [{}] * n
    sockets = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    return [{"NCCL_HOSTID": f"colonnade-rank-{rank}", **sockets} for rank in range(n)]

"""run_world: starts the processes of a world, watches them until every rank has reported, and cleans up completely.

`run_world` writes the pickled call to a private folder, starts one process per rank (`_World.start`; its code is
`rank.rank_main`) and watches them (`_World.watch`). A rank sends short messages over its link: LOADED, JOINED, REPORTED. Its
report is a file, so that the parent never blocks on a rank that dies while writing. Then the rank waits for permission to
exit, because peers may still use its sockets. The second half of this file prepares a world: start method, call, folder, port,
environments, and the CUDA multi-process service for several ranks on one GPU. `run_in_notebook` is `run_world` for a notebook.
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
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
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

# Seconds in which other ranks may fail on their own after a failure, and exit after all have reported.
_GRACE = 3.0
# Collectives time out before the deadline of the world, so that there is a traceback.
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
    """Run `fn(*args, **kwargs)` on `n` ranks, each in its own process, and return the results.

    A script that calls this needs `if __name__ == "__main__":`, as for any multiprocessing.

    Args:
        n: the number of ranks. There may be more ranks than GPUs, so that one GPU can test NCCL between several ranks: each
            rank then has its own NCCL_HOSTID, with NCCL_NET=Socket, NCCL_SOCKET_IFNAME=lo and NCCL_IB_DISABLE=1.
        fn: a function at the top level of a module.
        args: positional arguments of `fn`, sent by value.
        timeout: seconds after which the stacks of all ranks are recorded and the world is killed.
        check: raise WorldError if a rank fails.
        backend: backend of the default process group, which exists when `fn` starts. With "nccl" the current device of rank r
            is GPU r modulo the number of GPUs. None: only RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and
            MASTER_PORT (a free port) are set, for a function that calls `launch`.
        env: variables on top of the environment of this process and the defaults of the harness: one OMP thread, a TMPDIR that
            is removed with the world, and TORCH_DISTRIBUTED_DEBUG=DETAIL unless it is set. (DDP of torch 2.13 crashes with
            DETAIL on gloo; set OFF there.) The value None removes a variable.
        show: print the output of rank 0 live.
        kwargs: keyword arguments of `fn`, sent by value.

    Returns:
        The values, outcomes and output of all ranks.

    Script::

        import torch
        import torch.distributed as dist
        from colonnade.testing import run_world

        def add_up(value):
            total = torch.tensor(float(value))
            dist.all_reduce(total)
            return total.item()

        if __name__ == "__main__":
            assert run_world(4, add_up, 1).values == [4.0] * 4
    """
    if n < 1:
        raise LaunchError(f"n is {n}; run_world needs at least 1 rank.", code="C101")
    if timeout <= 0:
        raise LaunchError(f"timeout is {timeout}; give a number of seconds > 0.", code="C101")
    check_keywords(fn, kwargs)
    if backend is not None and "nccl" in backend and not torch.cuda.device_count():
        raise LaunchError(f"backend={backend!r} needs a GPU, but torch finds none. Use backend='gloo'.", code="C024")

    # Errors in the call are raised before a process starts.
    call, context, started = packed(fn, args, kwargs), context_for(fn), time.monotonic()
    with private_folder() as folder, loopback_socket(listening=backend is not None) as listener:
        port = listener.getsockname()[1]
        spec = WorldSpec(n, folder, environments(n, folder, port, env), backend, _GROUP_SHARE * timeout)
        spec.call.write_bytes(call)
        world = _World(spec, _Shown([spec.file(0, "stdout"), spec.file(0, "stderr")]) if show else None)
        # All processes have ended when this returns, even after an exception.
        try:
            world.start(context, listener)
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
    """The processes of one world and their outcomes so far."""

    spec: WorldSpec
    shown: _Shown | None = None
    ranks: list[_Rank] = field(default_factory=list)
    outcomes: dict[int, Outcome] = field(default_factory=dict)

    def start(self, context: ForkContext | ForkServerContext, listener: socket.socket) -> None:
        """Start all ranks; only rank 0 receives the listening socket of the store."""
        for rank in range(self.spec.world_size):
            link, far_end = context.Pipe()
            serves = rank == 0 and self.spec.backend is not None
            arguments = (rank, self.spec, far_end, listener if serves else None)
            process = context.Process(target=rank_main, args=arguments, name=f"colonnade-rank-{rank}")
            self.ranks.append(_Rank(process, link))
            process.start()
            far_end.close()

    def watch(self, timeout: float) -> tuple[Outcome, ...]:
        """Collect one outcome per rank; stop ranks that still run at the deadline, or a grace period after a failure."""
        deadline = stop_at = time.monotonic() + timeout
        while self._running() and time.monotonic() < stop_at:
            self._take_events(min(stop_at - time.monotonic(), _SHOW_SECONDS if self.shown else timeout))
            if self.shown is not None:
                self.shown.copy()
            failed = [rank for rank, outcome in self.outcomes.items() if not outcome.ok]
            running = [self.ranks[rank] for rank in self._running()]
            # A failed rank may exit, so that the collectives of its peers fail now. Not while a peer is still joining its group:
            # the peer would fail while joining, before it reaches the function.
            all_joined = all(rank.joined for rank in running)
            for rank in failed:
                if all_joined or not self.ranks[rank].joined:
                    self.ranks[rank].dismiss()
            # Other ranks have a grace period to fail on their own. It starts when all have imported the function, because on a
            # busy machine some may not have started yet.
            if failed and stop_at == deadline and all(rank.loaded for rank in running):
                stop_at = min(deadline, time.monotonic() + _GRACE)

        # Record the stacks of ranks that still run, then kill them.
        kind: Literal["timeout", "ended"] = "timeout" if stop_at == deadline else "ended"
        left = self._running()
        for number in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.ranks[number].process.pid or 0, STACK_SIGNAL)
        stacks = _full_texts([self.spec.file(number, "stack") for number in left])
        for number, text in zip(left, stacks, strict=True):
            stack = _without_guard(text) or _why_no_stack(self.ranks[number].process.pid)
            self.outcomes[number] = Outcome(number, kind, time.monotonic(), stack=stack)
            self.ranks[number].signal(signal.SIGKILL)

        # After a success every rank may exit by itself, within the grace period.
        if all(outcome.ok for outcome in self.outcomes.values()):
            for finished in self.ranks:
                finished.dismiss()
            end = time.monotonic() + _GRACE
            for finished in self.ranks:
                finished.process.join(max(0.0, end - time.monotonic()))
        return tuple(self.outcomes[rank] for rank in range(self.spec.world_size))

    def end(self) -> None:
        """Kill all remaining ranks and their children."""
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
        """Wait for reports and exits. A report from before the exit counts, so it is read first."""
        running = self._running()
        wait([source for rank in running for source in self.ranks[rank].sources()], max(0.0, seconds))
        for rank in running:
            if self.ranks[rank].read_messages():
                report = pickle.loads(self.spec.file(rank, "report").read_bytes())
                self.outcomes[rank] = Outcome(rank=rank, **report)
            elif self.ranks[rank].process.exitcode is not None:
                code = self.ranks[rank].process.exitcode or 0
                when = _NOT_RETURNED if self.spec.file(rank, "stack").exists() else _NOT_REACHED
                self.outcomes[rank] = Outcome.of_exit(rank, code, time.monotonic(), when)


@dataclass
class _Rank:
    """A rank, from the view of the parent.

    `is_linked`: its end of the link is open. `loaded`: it has imported the function. `joined`: it has joined the process group.
    `dismissed`: it was allowed to exit.
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
        """Read the messages of the rank; returns whether its report has arrived."""
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
        """Allow the rank to exit; sent once."""
        if not self.dismissed:
            self.dismissed = True
            with contextlib.suppress(OSError):
                self.link.send_bytes(b"leave")

    def signal(self, number: int) -> None:
        """Signal the process and its process group, which contains its children."""
        for send in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                send(self.process.pid or 0, number)


@dataclass
class _Shown:
    """Copies the output of a rank to this process, also in a notebook."""

    files: list[Path]
    read: dict[Path, int] = field(default_factory=dict)

    def copy(self) -> None:
        for file in self.files:
            if file.exists():
                with file.open("rb") as log:
                    log.seek(self.read.get(file, 0))
                    lines, newline, _ = log.read().rpartition(b"\n")
                if newline:
                    self.read[file] = self.read.get(file, 0) + len(lines) + 1
                    sys.stdout.write(lines.decode("utf-8", "replace") + "\n")
                    sys.stdout.flush()


def _full_texts(files: list[Path], seconds: float = 2.0) -> list[str]:
    """Wait until all files have text and stop growing, or until the timeout, and return their contents."""
    end, before = time.monotonic() + seconds, [-1] * len(files)
    while time.monotonic() < end:
        sizes = [file.stat().st_size if file.exists() else 0 for file in files]
        if sizes == before and all(sizes):
            break
        before = sizes
        time.sleep(0.05)
    return [_text(file) for file in files]


def _without_guard(stack: str) -> str:
    """A dump of all threads without the thread of the harness."""
    return "\n\n".join(thread for thread in stack.split("\n\n") if GUARD not in thread)


def _why_no_stack(pid: int | None) -> str:
    """The state of the process; a stopped one (T) cannot write its stacks."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "no stack: the process has exited"
    return "no stack: the process is stopped" if state in "Tt" else f"no stack: process state {state}"


def _text(path: Path) -> str:
    """The end of a log, of limited length."""
    if not path.exists():
        return ""
    with path.open("rb") as log:
        log.seek(max(0, path.stat().st_size - _LONGEST_LOG))
        return log.read().decode("utf-8", errors="replace")


# --- Preparation of a world: start method, call, folder, port, environments ---


def start_server(also: Sequence[str] = ()) -> ForkServerContext:
    """Start the fork server unless it runs, without waiting for its imports; returns its multiprocessing context.

    `also` are further modules that the server imports, for tests in which all ranks need these modules.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOAD, *(_PRELOAD_UNDER_PYTEST if "pytest" in sys.modules else ()), *also])
    forkserver.ensure_running()
    return context


def context_for(fn: Callable[..., Any]) -> ForkContext | ForkServerContext:
    """Return the start method for `fn`: the fork server, or plain fork for a function from a prompt or notebook.

    Such a function exists only in this process, in a `__main__` that no other process can import.
    """
    source = getattr(sys.modules["__main__"], "__file__", None)
    typed_in = fn.__module__ == "__main__" if source is None else not Path(source).exists()
    if typed_in and torch.cuda.is_initialized():
        raise LaunchError(
            "this process has used CUDA, so it cannot be copied for the ranks. Restart the process, and use the GPU "
            "only inside the function that the ranks run.",
            code="C101",
        )
    return multiprocessing.get_context("fork") if typed_in else start_server()


def check_keywords(fn: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Raise if `init=`, a former name of `backend=`, is passed to a function without a parameter of this name."""
    if "init" not in kwargs:
        return
    with contextlib.suppress(TypeError, ValueError):  # some callables have no signature
        if "init" in inspect.signature(fn).parameters:
            return
    raise LaunchError(
        f"run_world has no keyword init (got init={kwargs['init']!r}); its new name is backend. Pass "
        f"backend={kwargs['init']!r}. If the value is for {getattr(fn, '__qualname__', fn)}, add a parameter init to "
        "that function.",
        code="C115",
    )


def packed(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Pickle the call. If a value cannot be pickled, raise a LaunchError that names the value.

    Uses plain pickle, because the pickler of multiprocessing would share the memory of tensors between ranks.
    """
    name = getattr(fn, "__qualname__", repr(fn))
    if "<lambda>" in name or "<locals>" in name:
        raise LaunchError(
            f"run_world cannot send {name} to other processes, because it is a lambda or defined inside a function. "
            "Move it to the top level of a module and pass its data as arguments.",
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
                "Pass a module-level function and plain data or tensors; create other objects inside the function.",
                code="C101",
            ) from error
    return pickle.dumps((fn, args, kwargs))


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """Create a temporary folder that only this user can read, with a subfolder `tmp` as TMPDIR of the ranks."""
    folder = Path(tempfile.mkdtemp(prefix="colonnade-world-"))
    (folder / "tmp").mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def loopback_socket(listening: bool) -> Iterator[socket.socket]:
    """Reserve a free loopback port until the end of the world.

    A listening socket is passed to the store of rank 0, so that no port is chosen twice and nothing listens on other
    interfaces. A socket that is only bound reserves the port: a rank can listen on it (both sides reuse the address), but the
    kernel gives it to no other process.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        if listening:
            reserved.listen(socket.SOMAXCONN)
        yield reserved


def environments(n: int, folder: Path, port: int, env: Mapping[str, str | None] | None) -> tuple[dict[str, str], ...]:
    """Return the environment of each rank: that of this process, updated by the defaults, then by `env` (None removes)."""
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
    """Return the variables that NCCL needs on each of `n` ranks that share GPUs; empty dicts if no GPU is shared.

    NCCL rejects two ranks on the same device of the same host. Each rank therefore claims its own host, and the ranks
    communicate over loopback sockets, like hosts without a faster network.
    """
    if not 0 < torch.cuda.device_count() < n:
        return [{}] * n
    sockets = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    return [{"NCCL_HOSTID": f"colonnade-rank-{rank}", **sockets} for rank in range(n)]


_MPS = "nvidia-cuda-mps-control"
_MPS_SECONDS = 30


@contextlib.contextmanager
def cuda_mps() -> Iterator[bool]:
    """Inside the block, run the CUDA multi-process service (MPS): kernels of several ranks then run on one GPU concurrently.

    Without MPS the ranks take turns. Its pipes and logs are in a temporary folder, so it does not interfere with another
    service. Worlds that start inside the block use it. Yields True, or False with a warning if MPS is not installed.
    """
    if shutil.which(_MPS) is None:
        warnings.warn(
            f"{_MPS} is not on the PATH, so ranks that share a GPU take turns. It is part of the NVIDIA driver: "
            f"install that, or add its folder to the PATH.",
            stacklevel=3,
        )
        yield False
        return
    with tempfile.TemporaryDirectory(prefix="colonnade-mps-") as folder:
        places = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for place in places.values():
            os.mkdir(place)
        before = {name: os.environ.get(name) for name in places}
        os.environ.update(places)
        try:
            _control("-d")
            try:
                yield True
            finally:
                _control(commands="quit\n")
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


def _control(*arguments: str, commands: str | None = None) -> None:
    # Files instead of pipes: the service inherits its streams, and would keep a pipe open as long as it runs.
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as script:
        script.write(commands or "")
        script.seek(0)
        done = subprocess.run(
            [_MPS, *arguments], stdin=script, stdout=output, stderr=subprocess.STDOUT, timeout=_MPS_SECONDS, check=False
        )
        output.seek(0)
        text = output.read().strip()
    if done.returncode != 0:
        raise LaunchError(
            f"{_MPS} failed with exit status {done.returncode}: {text or 'no output'}. Remove cuda_mps() to run without MPS."
        )


def run_in_notebook(fn: Callable[..., Any], *args: Any, nproc: int = 2, timeout: float = 86_400, **kwargs: Any) -> Any:
    """Run `fn(*args, **kwargs)` on `nproc` ranks, show the output of rank 0 live, and return its result.

    Each rank is a copy of this process: it sees all definitions of earlier cells, and changes none of them here. Interrupting
    the cell stops all ranks.

    Args:
        fn: a function, which may be defined in a cell. It calls `colonnade.launch(config)` like a script.
        args: positional arguments of `fn`.
        nproc: the number of ranks.
        timeout: seconds after which all ranks are stopped.
        kwargs: keyword arguments of `fn`.

    Raises:
        WorldError: a rank failed; with its traceback.
        LaunchError: the notebook has already used a GPU, which cannot be shared with copies of the process.

    Notebook cell::

        def train():
            with colonnade.launch(dict(clip_grad_norm=1.0)) as gpc:
                return gpc.world_size

        colonnade.run_in_notebook(train, nproc=2)
    """
    plain = {"TORCH_DISTRIBUTED_DEBUG": "OFF"}
    return run_world(nproc, fn, *args, timeout=timeout, backend=None, env=plain, show=True, **kwargs).values[0]

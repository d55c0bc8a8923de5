"""The processes of `colonnade verify`: forked from a warm process if that is safe, otherwise started one by one.

torch and this package take about two CPU seconds to import, and a small script runs for less than that. `Processes`
therefore starts a warm process that imports both, and the packages in `_SAFE` that the script imports. The warm process
forks a process for each request (`serve`). A forked process runs the script like a started one: through
`colonnade.launching.bootstrap`, as `__main__`, in a separate session, with its own arguments, environment and log.

Forks are safe before CUDA is initialised and before threads exist: the warm process checks both and reports the result.
Every process is a new Python if forks are not safe, on systems other than Linux, and for scripts that compile a model
(`restart_without_forks`).

This file imports no torch, so that the warm process starts before its parent imports torch.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from colonnade.errors import ParityError
from colonnade.launching import bootstrap
from colonnade.launching.outcome import HIDDEN_FROM_HERE, end_with_parent

NEEDS_NEW_PYTHON = 77
"""The exit code of a forked process that reached code which must not run in a forked process."""

_PRELOAD = (
    "torch",
    "torch.distributed",
    "colonnade._launch",
    "colonnade.checkpoint.manager",
    "colonnade.engine.build",
    "colonnade.proof.script_job",
    "colonnade.proof.watch",
)
_SAFE = ("torch", "numpy", "colonnade", "transformers", "safetensors", "tokenizers", "einops")
"""Packages whose import starts no thread, initialises no device and does not depend on the rank."""
_READY_SECONDS = 120.0
_SHOWN = 4000
_DUMP_SECONDS = 1.0
_GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.02

_is_forked = False


def is_forked() -> bool:
    """Return whether this process was forked from a warm process."""
    return _is_forked


@dataclass(frozen=True)
class Command:
    """The start of one process: arguments of `colonnade.launching.bootstrap`, environment, and the file for its output."""

    words: Sequence[str]
    environment: Mapping[str, str]
    log: Path


class _Process(Protocol):
    """The methods of `subprocess.Popen` that are needed here."""

    @property
    def pid(self) -> int: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...


@dataclass(frozen=True)
class Running:
    """A started process, whose output goes to a file."""

    process: _Process
    log: Path

    def wait(self, until: float) -> int | None:
        """Wait until `until` (`time.monotonic`) and return the exit status; None if the process still runs."""
        try:
            return self.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None

    def output(self) -> str:
        """Return the end of the output."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _SHOWN))
            return file.read().replace(HIDDEN_FROM_HERE, b"").decode("utf-8", "replace").strip()


class Processes:
    """Starts the processes of a verification. The warm process ends with `close`, or with this process.

    Args:
        target: The script or module that the processes will run.
        is_module: Whether the target is a module.
    """

    def __init__(self, target: str, is_module: bool = False) -> None:
        self._link: socket.socket | None = None
        self._warm: subprocess.Popen[bytes] | None = None
        self._received = b""
        self._answers: list[dict[str, Any]] = []
        if sys.platform != "linux":
            return
        self._link, far_end = socket.socketpair()
        # Threads of numpy's library and a CUDA driver that the search for a GPU would initialise do not survive a fork. Each
        # forked process gets the environment of its own request.
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        environment.setdefault("OMP_NUM_THREADS", "1")
        with far_end:
            self._warm = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "colonnade.proof.processes",
                    str(far_end.fileno()),
                    *([] if is_module else [target]),
                ],
                pass_fds=[far_end.fileno()],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                preexec_fn=end_with_parent,
            )

    def close(self) -> None:
        """End the warm process and the processes that it forked."""
        if self._link is not None:
            self._link.close()
        if self._warm is not None:
            self._warm.kill()  # it may still import
            self._warm.wait()
        self._link = self._warm = None

    restart_without_forks = close

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def forks(self) -> bool:
        """Whether processes are forked. Reading it waits until the warm process has checked that forks are safe."""
        if self._link is not None and not self._answers:
            until = time.monotonic() + _READY_SECONDS
            while self._link is not None and not self._answers and time.monotonic() < until:
                self._take(_READY_SECONDS)
            if not self._answers or not self._answers[0]["safe"]:
                self.close()
        return self._link is not None

    @contextmanager
    def running(self, commands: Sequence[Command]) -> Iterator[list[Running]]:
        """Start these commands, and yield the processes. At the end of the block, stop all processes that still run."""
        started: list[Running] = []
        try:
            for command in commands:
                command.log.write_bytes(b"")
                started.append(Running(self._forked(command) if self.forks else _new(command), command.log))
            yield started
        finally:
            stop(started)

    def _forked(self, command: Command) -> _Process:
        assert self._link is not None
        environment = {**command.environment, bootstrap.LAUNCHER: str(self._warm.pid)}  # type: ignore[union-attr]
        words = {"words": list(command.words), "environment": environment, "log": str(command.log), "cwd": os.getcwd()}
        self._link.sendall(json.dumps(words).encode() + b"\n")
        count = len([answer for answer in self._answers if "started" in answer])
        while len(begun := [answer for answer in self._answers if "started" in answer]) == count:
            if not self._take(_READY_SECONDS) and self._link is None:
                raise ParityError("the process that forks the processes of this comparison was ended from outside")
        return _Forked(self, begun[-1]["started"])

    def status(self, pid: int, timeout: float) -> int | None:
        """Wait for a forked process and return its exit code; None if it still runs after `timeout` seconds."""
        until = time.monotonic() + timeout
        while True:
            for answer in self._answers:
                if answer.get("ended") == pid:
                    return int(answer["code"])
            if self._link is None:  # the warm process has died, and this one with it
                return -signal.SIGKILL
            if not self._take(max(0.0, until - time.monotonic())) and time.monotonic() >= until:
                return None

    def _take(self, timeout: float) -> bool:
        """Read the messages of the warm process, and wait at most `timeout` seconds for one; returns whether there was one."""
        assert self._link is not None
        if not select.select([self._link], [], [], timeout)[0]:
            return False
        chunk = self._link.recv(1 << 16)
        if not chunk:
            self.close()
        *lines, self._received = (self._received + chunk).split(b"\n")
        self._answers += [json.loads(line) for line in lines]
        return bool(lines)


@dataclass(frozen=True)
class _Forked:
    """A process that the warm process has forked, with the methods of `subprocess.Popen`."""

    home: Processes
    pid: int

    def wait(self, timeout: float | None = None) -> int:
        status = self.home.status(self.pid, 1e9 if timeout is None else timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return status

    def send_signal(self, sig: int) -> None:
        if self.home.status(self.pid, 0.0) is None:
            os.kill(self.pid, sig)


def _new(command: Command) -> subprocess.Popen[bytes]:
    """A process that is a new Python."""
    environment = {**command.environment, bootstrap.LAUNCHER: str(os.getpid())}
    with command.log.open("wb") as into:
        return subprocess.Popen(
            [sys.executable, "-u", "-m", bootstrap.__name__, *command.words],
            env=environment,
            stdout=into,
            stderr=subprocess.STDOUT,
            preexec_fn=end_with_parent,
        )


def stop(some: Sequence[Running]) -> None:
    """End processes with SIGTERM, and after some seconds with SIGKILL."""
    for job in some:
        with contextlib.suppress(ProcessLookupError):
            job.process.send_signal(signal.SIGTERM)
    until = time.monotonic() + _GRACE_SECONDS
    for job in some:
        if job.wait(until) is None:
            with contextlib.suppress(ProcessLookupError):
                job.process.send_signal(signal.SIGKILL)
            job.process.wait()


def wait_for_all(some: Sequence[Running], until: float) -> list[int | None] | None:
    """Wait until all processes have ended or one has failed; returns their exit codes (None: still running).

    Returns None at the time `until`. Python stacks of the processes that still run are then in their logs.
    """
    while True:
        codes = [job.wait(0.0) for job in some]
        if None not in codes or any(codes):
            return codes
        if time.monotonic() >= until:
            # Every process writes its stacks at SIGUSR1.
            for job, code in zip(some, codes, strict=True):
                if code is None:
                    with contextlib.suppress(ProcessLookupError):
                        job.process.send_signal(signal.SIGUSR1)
            time.sleep(_DUMP_SECONDS)
            return None
        some[codes.index(None)].wait(min(until, time.monotonic() + _POLL_SECONDS))


# --- In the warm process ---


def serve(link: socket.socket, script: str | None) -> Sequence[str] | None:
    """Run the loop of the warm process: fork a process for each request on the socket, and send its exit code back.

    Returns the arguments for `bootstrap` in each forked process, and None in the warm process when the link is closed.
    """
    global _is_forked
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C ends
    for name in _PRELOAD:
        importlib.import_module(name)
    for node in safe_imports(script) if script is not None else ():
        with contextlib.suppress(Exception):
            exec(compile(ast.Module([node], []), "<imports>", "exec"), {})
    torch: Any = sys.modules["torch"]
    threads = len(os.listdir("/proc/self/task"))
    _send(link, safe=threads == 1 and not torch.cuda.is_initialized() and not torch.distributed.is_initialized())

    # Collections in a forked process would touch, and so copy, the pages of all objects that it shares with this one.
    gc.collect()
    gc.freeze()
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writer.fileno())
    children: set[int] = set()
    received = b""
    while True:
        ready = select.select([link, reader], [], [])[0]
        if reader in ready:
            reader.recv(4096)
        for pid in list(children):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                children.discard(pid)
                _send(link, ended=pid, code=os.waitstatus_to_exitcode(status))
        if link not in ready:
            continue
        chunk = link.recv(1 << 16)
        if not chunk:
            return None
        *lines, received = (received + chunk).split(b"\n")
        for line in lines:
            request = json.loads(line)
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                for some in (link, reader, writer):
                    some.close()
                _is_forked = True
                _become(request)
                return list(request["words"])
            children.add(pid)
            _send(link, started=pid)


def _send(link: socket.socket, **answer: Any) -> None:
    with contextlib.suppress(BrokenPipeError):
        link.sendall(json.dumps(answer).encode() + b"\n")


def _become(request: Mapping[str, Any]) -> None:
    """Make this forked process like one that was started with the environment, folder and log of the request."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])

    # What torch and numpy read from the environment, and the seeds that they drew, when they were imported: a script that sets
    # no seed has other random numbers on each rank.
    torch: Any = sys.modules["torch"]
    torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))
    torch.distributed.set_debug_level_from_env()
    torch.default_generator.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def safe_imports(script: str) -> list[ast.stmt]:
    """Return the top-level import statements of a script for the packages in `_SAFE`."""
    try:
        body = ast.parse(Path(script).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return []
    found: list[ast.stmt] = []
    for node in body:
        if isinstance(node, ast.Import):
            names = [alias for alias in node.names if alias.name.partition(".")[0] in _SAFE]
            found += [ast.copy_location(ast.Import(names), node)] if names else []
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] in _SAFE:
            found.append(node)
    return found


def main() -> None:
    """Run the warm process: `serve` on the file descriptor that is the first argument.

    The second argument is the script.
    """
    words = serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2] if len(sys.argv) > 2 else None)
    if words is None:
        os._exit(0)
    sys.argv = [bootstrap.__file__, *words]
    bootstrap.main()


if __name__ == "__main__":
    from colonnade.proof.processes import main as main_of_module  # not of `__main__`, which the script replaces

    main_of_module()

"""`colonnade run`: starts the ranks of a job with the elastic agent of torchrun, prints their output and reports failures.

`launch` is the entry point. The agent does the hard part: processes in separate sessions, signals, the rendezvous of several
machines, restarts. It runs in this process instead of a `torchrun` child, so that its logs, failures and exit code can be turned
into one report. `bootstrap` is the entry point of a rank, `RankLogs` names the output files, which `Console` prints. `outcome` finds the
rank that failed first.

`AgentRendezvous` is where agents and ranks connect. A torch store listens on all interfaces. Here it listens only on the loopback
interface for a job on one machine, else on the address by which the other machines know this one. The launcher serves the store of the
ranks itself, on a port chosen by the kernel, so no other process can take the port before the ranks start. Every (re)start gets a new
store, because gloo would find the addresses of dead ranks in an old one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import sys
import tempfile
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend, create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from colonnade.comm.torch_versions import TCPStore
from colonnade.constants import SAVED, STOPPED_IN_ORDER, TERMINAL
from colonnade.context.rendezvous import launchers_met, listening_at
from colonnade.launching.bootstrap import LAUNCHER
from colonnade.launching.launch_job import LaunchJob, Prefix, cores
from colonnade.launching.outcome import (
    HIDDEN_FROM_HERE,
    Outcome,
    first_failure,
    launch_report,
    read_failure,
    silent_failure,
    who_failed,
    without_frames,
)

BACKEND = "colonnade"
STATIC_BACKEND = "colonnade-placed"
"""The backend if every machine has a --node-rank."""
_SECONDS = 60


class AgentRendezvous(RendezvousHandler):
    """The rendezvous of torch, extended: the machines also agree on a store for this start and on the number of restarts."""

    def __init__(self, inner: Any, one_host: bool) -> None:
        self._inner, self._one_host = inner, one_host
        self._served: Any = None
        self._starts = 0
        self.restarts = 0
        """The number of starts before this one; equal on every machine."""

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the launchers of the other machines. The launcher of the first machine serves the store of the ranks."""
        met = self._inner.next_rendezvous()
        if met.rank == 0:
            host = "127.0.0.1" if self._one_host else met.bootstrap_store_info.master_addr
            self._served = serve_store(host, 0, self._one_host)
            met.store.set("colonnade/ranks meet", f"{host} {self._served.port} {self._starts}")
        host, port, starts = met.store.get("colonnade/ranks meet").decode().split()
        self.restarts, self._starts = int(starts), self._starts + 1
        return RendezvousInfo(met.store, met.rank, met.world_size, RendezvousStoreInfo(host, int(port)))

    @property
    def use_agent_store(self) -> bool:
        """Always True: the launcher serves the store, not a rank."""
        return True

    def get_backend(self) -> str:
        """Return the name of this rendezvous in the registry of torch."""
        return BACKEND

    def is_closed(self) -> bool:
        """Return the result of torch's rendezvous."""
        return bool(self._inner.is_closed())

    def set_closed(self) -> None:
        """Close torch's rendezvous."""
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        """Return the result of torch's rendezvous."""
        return int(self._inner.num_nodes_waiting())

    def get_run_id(self) -> str:
        """Return the result of torch's rendezvous."""
        return str(self._inner.get_run_id())

    def shutdown(self) -> bool:
        """Shut torch's rendezvous down."""
        return bool(self._inner.shutdown())


class StaticAgentRendezvous(StaticTCPRendezvous):
    """The rendezvous of torch for machines with a given --node-rank.

    The first machine serves one store for the whole job.
    """

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store and the number of this machine."""
        if self._store is not None:
            return super().next_rendezvous()
        return launchers_met(f"{self.master_addr}:{self.master_port}", timedelta(seconds=_SECONDS), self._first)

    def _first(self) -> RendezvousInfo:
        if self.rank == 0:
            self._store = serve_store(self.master_addr, self.master_port, False)
        return super().next_rendezvous()

    def get_backend(self) -> str:
        """Return the name of this rendezvous in the registry of torch."""
        return STATIC_BACKEND


def serve_store(host: str, port: int, one_host: bool) -> TCPStore:
    """Serve a store in this process, only on this address if possible. Port 0 means any free port."""
    try:
        listener = listening_at(host, port, one_host)
    except OSError:  # the port is in use (torch reports that), or the address is forwarded here by another machine
        listener = None
    return _served(host, listener.getsockname()[1] if listener is not None else port, listener, multi_tenant=port != 0)


def _served(host: str, port: int, listener: socket.socket | None, multi_tenant: bool) -> TCPStore:
    return TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=_SECONDS),
        wait_for_workers=False,
        multi_tenant=multi_tenant,
        master_listen_fd=listener.detach() if listener is not None else None,
    )


handlers: list[AgentRendezvous] = []
"""The handlers of this process, in order of creation."""


def make_handler(params: RendezvousParameters) -> AgentRendezvous:
    one_host = params.get("store_type") == "file"
    if one_host:
        # A single machine needs no socket; its agent uses a file.
        backend, store = create_backend(params)
    else:
        # The machine with the address of the endpoint serves the store of all agents, on that address only.
        host, _, port = params.endpoint.rpartition(":")
        try:
            listener = listening_at(host, int(port), False)
        except OSError:  # another machine has the address, or another launcher on this machine the port
            listener = None
        if listener is None:
            limit = timedelta(seconds=_SECONDS)
            backend, store = launchers_met(params.endpoint, limit, lambda: create_backend(params))
        else:
            store = _served(host, int(port), listener, multi_tenant=True)
            backend = C10dRendezvousBackend(store, params.run_id)
    handlers[:] = [AgentRendezvous(create_handler(store, backend, params), one_host)]
    return handlers[-1]


def make_static_handler(params: RendezvousParameters) -> StaticAgentRendezvous:
    handlers.clear()
    host, _, port = params.endpoint.rpartition(":")
    return StaticAgentRendezvous(host, int(port), int(params.config["rank"]), params.max_nodes, params.run_id, _SECONDS)


rendezvous_handler_registry.register(BACKEND, make_handler)
rendezvous_handler_registry.register(STATIC_BACKEND, make_static_handler)


_POLL_SECONDS = 0.1
_COPY_SECONDS = 0.05
_CHUNK = 1 << 16


def launch(job: LaunchJob) -> int:
    """Run the job to its end; returns the exit status for this process."""
    nproc = job.nproc or torch.cuda.device_count() or 1

    # The ranks inherit the environment of this process: threads per rank on shared cores, and how to find the launcher.
    os.environ[LAUNCHER] = str(os.getpid())
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(job.grace)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // nproc)))
    os.environ.pop(TERMINAL, None)
    if sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and job.prefix != "all":
        os.environ[TERMINAL] = str(shutil.get_terminal_size().columns)
    if job.nnodes == 1 and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    # The agent logs failures too; the report below prints them once.
    logging.disable(logging.CRITICAL)

    with contextlib.ExitStack() as stack:
        # Without --log-dir the logs are temporary; the console has printed them.
        if job.log_dir is not None:
            folder = job.log_dir.resolve()
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="colonnade-logs-")))
        private = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="colonnade-run-")))
        saved = private / "saved"
        os.environ[SAVED] = str(saved)
        console = Console(job.prefix)
        logs = RankLogs(folder, console)

        # One machine uses a file as rendezvous and a random job name, so that jobs cannot collide. Several machines connect to
        # the endpoint, numbered by arrival or by --node-rank, and must have the same job name.
        rendezvous: dict[str, Any]
        if job.nnodes == 1:
            rendezvous = {
                "run_id": uuid.uuid4().hex,
                "rdzv_backend": BACKEND,
                "rdzv_endpoint": str(private / "store"),
                "rdzv_configs": {"store_type": "file"},
                "local_addr": "127.0.0.1",
            }
        else:
            rendezvous = {"run_id": f"colonnade-{job.endpoint}", "rdzv_backend": BACKEND, "rdzv_endpoint": job.endpoint}
            if job.node_rank is not None:
                rendezvous |= {"rdzv_backend": STATIC_BACKEND, "rdzv_configs": {"rank": job.node_rank}}
        config = LaunchConfig(
            min_nodes=job.nnodes,
            max_nodes=job.nnodes,
            nproc_per_node=nproc,
            max_restarts=job.max_restarts,
            monitor_interval=_POLL_SECONDS,
            logs_specs=logs,
            **rendezvous,
        )

        kind = "module" if job.is_module else "script"
        names = "as-colossalai" if job.as_colossalai else "plain"
        command = ["-u", "-m", "colonnade.launching.bootstrap", kind, names, job.target, *job.arguments]
        try:
            elastic_launch(config, sys.executable)(*command)
        except ChildFailedError as error:
            text, status = logs.report(error.failures)
        except SignalException as error:
            # This exit status tells a scheduler that all ranks saved and that the job can be restarted.
            if logs.stopped_in_order():
                console.close()
                console.say(f"colonnade: stopped by {error.sigval.name}; all ranks finished their step and exited")
                return STOPPED_IN_ORDER
            text, status = f"colonnade: ended by {error.sigval.name}", 128 + error.sigval
        else:
            console.close()
            return 0
        console.close()
        # After a failure or an interrupt the newest checkpoint matters; the run notes it in this file.
        if saved.is_file():
            text = f"saved last: {saved.read_text(encoding='utf-8')}\n{text}"
        console.say(text)
        return status


class RankLogs(LogsSpecs):
    """The output files of the ranks: rank<N>.stdout and .stderr, in a subfolder restart<K> after the K-th restart."""

    def __init__(self, folder: Path, console: Console) -> None:
        super().__init__(log_dir=str(folder))
        self._folder = folder
        self._console = console
        self._current = folder
        self._ranks: list[int] = []

    @property
    def root_log_dir(self) -> str:
        """The folder of all logs."""
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the output files for one start of all local ranks; the console follows these files."""
        if handlers:  # the count of torch differs between machines: each counts the failures it has seen
            for env in envs.values():
                env["TORCHELASTIC_RESTART_COUNT"] = str(handlers[-1].restarts)
        restart = int(envs[0]["TORCHELASTIC_RESTART_COUNT"])
        if restart:
            self._console.drain()
            first = first_failure(self._notes().values())
            if first is not None and first.lost_a_peer:
                reason = f"{who_failed(first)} ({first.cause})" if first.named_ranks else "a rank died"
            else:
                reason = first.headline if first is not None else "a rank died"
            self._console.say(f"colonnade: {reason}; restart {restart}")
        self._current = self._folder / f"restart{restart}" if restart else self._folder
        self._current.mkdir(parents=True, exist_ok=True)
        ranks = {local_rank: int(env["RANK"]) for local_rank, env in envs.items()}
        self._ranks = list(ranks.values())
        for local_rank, rank in ranks.items():
            self._file(rank, "error").unlink(missing_ok=True)
            envs[local_rank]["TORCHELASTIC_ERROR_FILE"] = str(self._file(rank, "error"))
        self._console.follow(
            [(rank, self._emptied(rank, "stdout"), self._emptied(rank, "stderr")) for rank in ranks.values()]
        )
        return LogsDest(
            stdouts={local_rank: str(self._file(rank, "stdout")) for local_rank, rank in ranks.items()},
            stderrs={local_rank: str(self._file(rank, "stderr")) for local_rank, rank in ranks.items()},
            error_files={local_rank: str(self._file(rank, "error")) for local_rank, rank in ranks.items()},
        )

    def report(self, failures: Mapping[int, ProcessFailure]) -> tuple[str, int]:
        """Return the report on the failed ranks, and the exit status.

        The agent stops all ranks as soon as one has exited. A rank that wrote a failure note but did not exit therefore
        counts, too.
        """
        notes = self._notes()
        silent = {
            rank: silent_failure(rank, failure.exitcode, failure.timestamp)
            for rank, failure in failures.items()
            if rank not in notes
        }
        outcomes = {**notes, **silent}
        return launch_report(outcomes, {rank: self._file(rank, "stderr") for rank in outcomes})

    def stopped_in_order(self) -> bool:
        """Return whether every rank exited on its own with the exit status of an orderly stop (75)."""
        notes = self._notes()
        return 0 < len(notes) == len(self._ranks) and all(note.exitcode == STOPPED_IN_ORDER for note in notes.values())

    def _notes(self) -> dict[int, Outcome]:
        """The failure notes of the ranks of the current start."""
        found = {rank: read_failure(rank, self._file(rank, "error")) for rank in self._ranks}
        return {rank: note for rank, note in found.items() if note is not None}

    def _emptied(self, rank: int, kind: str) -> Path:
        file = self._file(rank, kind)
        file.write_bytes(b"")
        return file

    def _file(self, rank: int, kind: str) -> Path:
        return self._current / f"rank{rank}.{kind}"


# --- The output of the ranks on one console: rank 0 unchanged, other ranks line by line with their number ---


@dataclass
class _FollowedFile:
    """A growing log file, and the stream that its lines are copied to."""

    path: Path
    rank: int
    target: BinaryIO
    prefix: bytes
    position: int = 0
    partial: bytes = b""
    hidden: bool = False

    def new_bytes(self) -> bytes:
        """Return the bytes since the last call, without the traceback. The launcher prints the traceback at the end."""
        if self.hidden or not self.path.exists():
            return b""
        with self.path.open("rb") as log:
            log.seek(self.position)
            chunk = log.read(_CHUNK)
        self.position += len(chunk)
        shown, mark, _ = chunk.partition(HIDDEN_FROM_HERE)
        self.hidden = bool(mark)
        return shown


@dataclass
class Console:
    """Copies rank logs to stdout and stderr of this process until it is closed.

    Output of a rank without prefix is copied at once, so that progress bars work; output with a prefix is copied in complete
    lines. An incomplete line of another rank is ended first. If the reader of the output disappears, the job continues and its
    output is dropped.
    """

    prefix: Prefix
    out: BinaryIO = field(default_factory=lambda: sys.stdout.buffer)
    err: BinaryIO = field(default_factory=lambda: sys.stderr.buffer)
    _files: list[_FollowedFile] = field(default_factory=list)
    _open_line_of: _FollowedFile | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closing: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def follow(self, logs: Sequence[tuple[int, Path, Path]]) -> None:
        """Copy these (rank, stdout, stderr) files from their start, instead of earlier ones."""
        self.drain()
        with self._lock:
            self._files = [
                _FollowedFile(path, rank, target, self._prefix_of(rank, target))
                for rank, *paths in logs
                for path, target in zip(paths, (self.out, self.err), strict=True)
            ]
        if self._thread is None:
            self._thread = threading.Thread(target=self._copy, name="colonnade-console", daemon=True)
            self._thread.start()

    def drain(self) -> None:
        """Copy everything written so far, including incomplete last lines."""
        while self._copy_once():
            pass
        with self._lock:
            for file in self._files:
                if file.partial:
                    self._write(file, file.prefix + file.partial + b"\n")
                    file.partial = b""
            self._end_open_line()

    def say(self, text: str) -> None:
        """Write a message of the launcher to stderr."""
        with self._lock:
            self._end_open_line()
            _put(self.err, text.encode("utf-8", "backslashreplace") + b"\n")

    def close(self) -> None:
        """Copy everything for the last time, and stop."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        self.drain()

    def _copy(self) -> None:
        while not self._closing.wait(_COPY_SECONDS):
            self._copy_once()

    def _copy_once(self) -> bool:
        """Copy one chunk per file; returns whether there was output."""
        with self._lock:
            return sum(self._take(file) for file in self._files) > 0

    def _take(self, file: _FollowedFile) -> bool:
        chunk = file.new_bytes()
        if not chunk:
            return False
        if file.prefix:
            complete, newline, file.partial = (file.partial + chunk).rpartition(b"\n")
            if newline:
                text = without_frames(complete.decode("utf-8", "surrogateescape") + "\n")
                shown = "".join(f"{file.prefix.decode()}{line}\n" for line in text.split("\n")[:-1])
                self._write(file, shown.encode("utf-8", "surrogateescape"))
        else:
            self._write(file, chunk)
        return True

    def _write(self, file: _FollowedFile, content: bytes) -> None:
        if self._open_line_of not in (None, file):
            self._end_open_line()
        _put(file.target, content)
        self._open_line_of = None if content.endswith((b"\n", b"\r")) else file

    def _end_open_line(self) -> None:
        if self._open_line_of is not None:
            _put(self._open_line_of.target, b"\n")
            self._open_line_of = None

    def _prefix_of(self, rank: int, target: BinaryIO) -> bytes:
        if self.prefix == "none" or (self.prefix == "others" and rank == 0):
            return b""
        plain = f"[rank {rank}] "
        in_colour = target.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        return (f"\x1b[2m{plain}\x1b[0m" if in_colour else plain).encode()


def _put(target: BinaryIO, content: bytes) -> None:
    try:
        target.write(content)
        target.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, target.fileno())
        os.close(nowhere)

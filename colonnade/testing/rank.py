"""The code of `run_world` inside a rank: capture output, join the group, call the function, report, exit."""

from __future__ import annotations

import datetime
import faulthandler
import gc
import importlib
import os
import pickle
import re
import resource
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import parent_process
from pathlib import Path
from typing import Any, NoReturn

from colonnade.launching.outcome import description, end_with_parent

LOADED = b"loaded"
JOINED = b"joined"
REPORTED = b"reported"
STACK_SIGNAL = signal.SIGUSR1
GUARD = "_watch_parent"
_LONGEST_REPR = 300


@dataclass(frozen=True)
class WorldSpec:
    """The description of a world, which its ranks receive.

    `folder` belongs to the world, and is removed at the end of the world.
    """

    world_size: int
    folder: Path
    environments: tuple[dict[str, str], ...]
    backend: str | None
    group_timeout: float

    @property
    def call(self) -> Path:
        """The path of the file with the pickled (function, args, kwargs)."""
        return self.folder / "call.pickle"

    def file(self, rank: int, kind: str) -> Path:
        """Return the path of a file of a rank; `kind` is "stdout", "stderr", "stack" or "report"."""
        return self.folder / f"rank{rank}.{kind}"


def rank_main(rank: int, spec: WorldSpec, link: Connection[Any, Any], listener: socket.socket | None) -> NoReturn:
    """Run the function of the world as `rank`, report the result, and exit when the parent allows it over `link`."""
    gc.freeze()  # garbage collection would otherwise touch, and so copy, all pages shared with the fork server

    # The rank and its children end, and the folder is removed, even if the harness is killed.
    os.setpgid(0, 0)
    end_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.Thread(target=_watch_parent, args=(spec.folder,), daemon=True).start()

    # File descriptors, not only the streams of Python, go to the logs, because C++ writes there too. Lines are flushed, so that
    # the log is complete even if the rank is killed next.
    for number, kind in ((1, "stdout"), (2, "stderr")):
        log = os.open(spec.file(rank, kind), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, number)
        os.close(log)
    sys.stdout = _line_by_line(1)
    sys.stderr = _line_by_line(2)
    faulthandler.enable(sys.stderr, all_threads=True)
    faulthandler.register(STACK_SIGNAL, spec.file(rank, "stack").open("w"), all_threads=True)

    # Replace the environment of the fork server, and settings that torch read from it when it was imported there.
    os.environ.clear()
    os.environ.update(spec.environments[rank])
    tempfile.tempdir = None
    torch = importlib.import_module("torch")
    torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))
    importlib.import_module("torch.distributed").set_debug_level_from_env()

    try:
        function, args, kwargs = pickle.loads(spec.call.read_bytes())
        link.send_bytes(LOADED)
        if spec.backend is not None:
            _join_group(rank, spec, spec.backend, listener)
        link.send_bytes(JOINED)
        value = function(*args, **kwargs)
        try:
            report = pickle.dumps({"kind": "value", "value": value, "time": time.monotonic()})
        except Exception as error:
            raise TypeError(
                f"{function.__qualname__} returned a {type(value).__name__} that cannot be pickled ({error}); "
                "return plain data or tensors"
            ) from error
    except BaseException as error:  # SystemExit and KeyboardInterrupt are failures of this rank too
        fields = description(error, [__file__])
        fields["traceback"] += _asserted_values(error)
        _send(pickle.dumps({**fields, "time": time.monotonic()}), rank, spec, link)
        # The parent answers when every peer has joined the group. Exiting then makes their collectives fail now instead of at
        # their timeout; exiting earlier would make a peer fail while it joins, before it reaches the function.
        link.recv_bytes()
        _leave(1)
    _send(report, rank, spec, link)
    # Peers may still communicate with this rank, so its sockets stay open until every rank has reported. Process groups are not
    # destroyed: that takes 25 ms per gloo group (70 ms with DETAIL), and the kernel cleans up for free.
    link.recv_bytes()
    _leave(0)


def _send(report: bytes, rank: int, spec: WorldSpec, link: Connection[Any, Any]) -> None:
    """Write the report to a file, then notify the parent, which therefore never blocks on a rank that dies while writing."""
    spec.file(rank, "report").write_bytes(report)
    link.send_bytes(REPORTED)


def _watch_parent(folder: Path) -> None:
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)


def _line_by_line(number: int) -> Any:
    """A line-buffered text stream on a file descriptor."""
    return open(number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _join_group(rank: int, spec: WorldSpec, backend: str, listener: socket.socket | None) -> None:
    """Create the default process group; rank 0 serves its store on the socket `listener`."""
    torch, distributed = importlib.import_module("torch"), importlib.import_module("torch.distributed")
    if "nccl" in backend:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    patience = datetime.timedelta(seconds=spec.group_timeout)
    store = distributed.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        spec.world_size,
        is_master=rank == 0,
        timeout=patience,
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener else None,
    )
    distributed.init_process_group(backend, store=store, rank=rank, world_size=spec.world_size, timeout=patience)


def _asserted_values(error: BaseException) -> str:
    """The variables of a failed bare `assert`, which pytest cannot show because it runs in another process."""
    trace = error.__traceback__
    if not isinstance(error, AssertionError) or error.args or trace is None:
        return ""
    last = traceback.extract_tb(trace)[-1]
    while trace.tb_next is not None:
        trace = trace.tb_next
    names = dict.fromkeys(re.findall(r"[A-Za-z_]\w*", last.line or ""))
    known = {name: trace.tb_frame.f_locals[name] for name in names if name in trace.tb_frame.f_locals}
    return "".join(f"  where {name} = {_short(value)}\n" for name, value in known.items())


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_REPR else text[:_LONGEST_REPR] + "..."


def _leave(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

"""The ranks' output on one console: rank 0 as it comes, the others line by line behind their rank."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal

from colonnade.cli.launching.failures import HIDDEN_FROM_HERE, without_frames

_PERIOD = 0.05
_CHUNK = 1 << 16

Prefix = Literal["others", "all", "none"]


@dataclass
class _Tail:
    """One growing log file and where its lines go."""

    path: Path
    rank: int
    target: BinaryIO
    prefix: bytes
    position: int = 0
    partial: bytes = b""
    hidden: bool = False

    def new_bytes(self) -> bytes:
        """Return what was written since, up to the traceback that the launcher shows at the end."""
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
    """Copies rank logs to this process's stdout and stderr until closed.

    Bytes of a rank without a prefix are copied at once, so progress bars work; a prefixed rank's are copied
    by whole lines. A line that another rank left open is ended first. If the reader of our output goes
    away, the job goes on and its output is dropped.
    """

    prefix: Prefix
    out: BinaryIO = field(default_factory=lambda: sys.stdout.buffer)
    err: BinaryIO = field(default_factory=lambda: sys.stderr.buffer)
    _tails: list[_Tail] = field(default_factory=list)
    _open_line_of: _Tail | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closing: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def follow(self, logs: Sequence[tuple[int, Path, Path]]) -> None:
        """Follow the (rank, stdout, stderr) files from their beginning, instead of those followed before."""
        self.drain()
        with self._lock:
            self._tails = [
                _Tail(path, rank, target, self._prefix_of(rank, target))
                for rank, *paths in logs
                for path, target in zip(paths, (self.out, self.err), strict=True)
            ]
        if self._thread is None:
            self._thread = threading.Thread(target=self._copy, name="colonnade-console", daemon=True)
            self._thread.start()

    def drain(self) -> None:
        """Copy everything that has been written so far, with the last lines even if they are not ended."""
        while self._copy_once():
            pass
        with self._lock:
            for tail in self._tails:
                if tail.partial:
                    self._write(tail, tail.prefix + tail.partial + b"\n")
                    tail.partial = b""
            self._end_open_line()

    def say(self, text: str) -> None:
        """Write a message of the launcher itself to stderr."""
        with self._lock:
            self._end_open_line()
            _put(self.err, text.encode("utf-8", "backslashreplace") + b"\n")

    def close(self) -> None:
        """Stop following, after a last copy."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        self.drain()

    def _copy(self) -> None:
        while not self._closing.wait(_PERIOD):
            self._copy_once()

    def _copy_once(self) -> bool:
        """Copy one chunk per file; return whether there was any."""
        with self._lock:
            return sum(self._take(tail) for tail in self._tails) > 0

    def _take(self, tail: _Tail) -> bool:
        chunk = tail.new_bytes()
        if not chunk:
            return False
        if tail.prefix:
            whole, newline, tail.partial = (tail.partial + chunk).rpartition(b"\n")
            if newline:
                text = without_frames(whole.decode("utf-8", "surrogateescape") + "\n")
                shown = "".join(f"{tail.prefix.decode()}{line}\n" for line in text.split("\n")[:-1])
                self._write(tail, shown.encode("utf-8", "surrogateescape"))
        else:
            self._write(tail, chunk)
        return True

    def _write(self, tail: _Tail, content: bytes) -> None:
        if self._open_line_of not in (None, tail):
            self._end_open_line()
        _put(tail.target, content)
        self._open_line_of = None if content.endswith((b"\n", b"\r")) else tail

    def _end_open_line(self) -> None:
        if self._open_line_of is not None:
            _put(self._open_line_of.target, b"\n")
            self._open_line_of = None

    def _prefix_of(self, rank: int, target: BinaryIO) -> bytes:
        if self.prefix == "none" or (self.prefix == "others" and rank == 0):
            return b""
        plain = f"[rank {rank}] "
        return (f"\x1b[2m{plain}\x1b[0m" if _has_colour(target) else plain).encode()


def _put(target: BinaryIO, content: bytes) -> None:
    try:
        target.write(content)
        target.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, target.fileno())
        os.close(nowhere)


def _has_colour(target: BinaryIO) -> bool:
    return target.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

"""How ranks of `colonnade run` failed: the note that each leaves, and the report that ends in the first traceback."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

from colonnade.error_pages import codes_in
from colonnade.errors import listed
from colonnade.launching.outcome import Outcome, first_failure, tail

HIDDEN_FROM_HERE = b"\x1e"
"""Ends what the launcher shows of a rank's stderr as it comes: the traceback after it is shown last, and once."""

# A rank that dies without a word is noticed by its peers before the launcher sees it is gone, so their notes are
# older than its death seems to be: the agent polls, and counts whole seconds.
_HEAD_START = 2.0

_FRAMES = re.compile(
    r"(?:^(?:\[rank \d+\] )?(?:Exception raised from|frame #\d+:|C\+\+ CapturedTraceback:|#\d+ ).*\n)+", re.MULTILINE
)


def write_failure(file: Path, fields: Mapping[str, Any], status: int) -> None:
    """Leave the fields of an `Outcome` for the launcher, in a form that torchrun's own tools read as well.

    Whole or not at all: the launcher may be ending this rank at the same time. `status` is the exit status that
    the rank is about to return; it may be ended before it gets there.
    """
    now = time.time()
    told = {"py_callstack": fields["traceback"], "timestamp": str(int(now))}
    content = {
        "message": {"message": f"{fields['type']}: {fields['message']}", "extraInfo": told},
        "outcome": {**fields, "exitcode": status, "time": now},
    }
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    scratch.write_text(json.dumps(content))
    scratch.replace(file)


def read_failure(rank: int, file: Path) -> Outcome | None:
    """Return what a rank left, or None if it died without a word."""
    if not file.is_file():
        return None
    fields = json.loads(file.read_text())["outcome"]
    return Outcome(rank=rank, **{**fields, "told_of": tuple(fields.get("told_of", ()))})


def silent_failure(rank: int, exitcode: int, seen: float) -> Outcome:
    """Return the outcome of a rank that left nothing; `seen` is when the launcher noticed."""
    if exitcode == -signal.SIGTERM:
        return Outcome(rank, "ended", seen, exitcode=exitcode)
    return Outcome.of_exit(rank, exitcode, seen - _HEAD_START, "it left no traceback")


def exit_status(outcome: Outcome) -> int:
    """Return the exit status that a shell would give, or would have given had the rank not been ended."""
    code = outcome.exitcode or 0
    return 128 - code if code < 0 else code


def report(outcomes: Mapping[int, Outcome], stderr: Mapping[int, Path]) -> tuple[str, int]:
    """Return the text on the failed ranks and the exit status of the first.

    The other ranks; then the first failure: the verdict and its traceback, or its last words and the verdict.
    """
    first = first_failure(outcomes.values())
    assert first is not None
    others = _others([outcomes[rank] for rank in sorted(outcomes) if rank != first.rank], first)
    verdict = f"colonnade: {who_failed(first)}, exit status {exit_status(first)}"
    if first.traceback:
        more = "".join(f"; colonnade explain {code} says more" for code in codes_in(first.message)[-1:])
        told = [verdict + more, first.traceback]
    else:
        log = stderr[first.rank]
        words = without_frames(log.read_text(errors="replace")) if log.is_file() else ""
        told = [tail(f"stderr of rank {first.rank}", words), f"{verdict}: {first.cause}"]
    return "\n".join(part for part in [*others, *told] if part).rstrip(), exit_status(first)


def who_failed(first: Outcome) -> str:
    """Name the rank that failed first; `first` may be one that only lost it, or was told of it."""
    if not first.lost_a_peer:
        return f"rank {first.rank} failed first"
    if first.told_of:
        ranks = f"rank {first.told_of[0]}" if len(first.told_of) == 1 else f"ranks {listed(first.told_of)}"
        return f"{ranks} failed first, as rank {first.rank} was told"
    return (
        f"rank {first.rank} lost another rank, and none that failed by itself has said so here: look at the output of the "
        f"other hosts and at what ended that rank"
    )


def without_frames(text: str) -> str:
    """Fold the stacks that torch's C++ writes: they say where in torch, never what went wrong."""
    return _FRAMES.sub(lambda found: f"({found[0].count(chr(10))} lines of torch's stack)\n", text)


def _others(outcomes: list[Outcome], first: Outcome) -> list[str]:
    """A line for each rank that failed by itself, and one for all those that only lost a peer."""
    lost = [outcome.rank for outcome in outcomes if outcome.lost_a_peer or outcome.kind == "ended"]
    own = [outcome.headline for outcome in outcomes if outcome.rank not in lost]
    gone = f"rank {first.rank}"
    if (
        first.lost_a_peer
    ):  # the rank that failed is another one, which had no time to leave a note, or is on another host
        lost = [rank for rank in lost if rank not in first.told_of]
        gone = f"rank {listed(first.told_of)}" if first.told_of else "another rank"
    ranks = f"rank {lost[0]}" if len(lost) == 1 else f"ranks {listed(lost)}"
    return [*own, *([f"{ranks}: ended because {gone} was gone"] if lost else [])]


# --------------------------------------------------------------------------------------------------
# The ranks' output on one console: rank 0 as it comes, the others line by line behind their rank.
# --------------------------------------------------------------------------------------------------


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

"""The outcomes of ranks: how each rank ended, which one failed first, and the reports. Imports no torch.

A rank describes its own failure (`description`). A rank of `colonnade run` writes the description to a file for the launcher
(`write_failure`, `read_failure`); a rank of `run_world` sends it to its parent. `first_failure` finds the cause.
`WorldResult.report` is the report of a test, `launch_report` that of `colonnade run`.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from colonnade.error_pages import codes_in
from colonnade.errors import ColonnadeError, Consequence, consequence_of, listed, lost_a_peer

Kind = Literal["value", "exception", "signal", "exit", "timeout", "ended"]

_PR_SET_PDEATHSIG = 1
_TAIL_LINES = 25
_NOT_THE_USERS = ("site-packages", os.path.dirname(os.__file__))
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

HIDDEN_FROM_HERE = b"\x1e"
"""Separates the live output in the stderr of a rank from the traceback, which the launcher prints once, at the end."""

# When a rank dies without a note, other ranks notice it before the launcher does, because the agent polls and counts whole
# seconds. Their notes would seem older than the death that caused them, so it is dated back by this many seconds.
_HEAD_START = 2.0

_FRAMES = re.compile(
    r"(?:^(?:\[rank \d+\] )?(?:Exception raised from|frame #\d+:|C\+\+ CapturedTraceback:|#\d+ ).*\n)+", re.MULTILINE
)


@dataclass(frozen=True)
class Outcome:
    """How one rank ended.

    Attributes:
        kind: "value" (the function returned `value`), "exception" (`type`, `message`, `traceback`), "signal" (named by
            `signal`), "exit" (the process exited with `exitcode`; `message` describes when), "timeout" (still running at the
            deadline) or "ended" (stopped, because another rank had failed).
        time: the monotonic clock when the rank ended.
        stack: the Python stacks of a rank that was stopped.
        consequence: whether an exception is only a consequence of the failure of other ranks; None: decided by the message.
        named_ranks: the ranks that failed, if the exception names them.
    """

    rank: int
    kind: Kind
    time: float
    value: Any = None
    type: str = ""
    message: str = ""
    traceback: str = ""
    signal: str = ""
    exitcode: int | None = None
    stack: str = ""
    consequence: Consequence | None = None
    named_ranks: tuple[int, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the function returned."""
        return self.kind == "value"

    @classmethod
    def of_exit(cls, rank: int, exitcode: int, time: float, message: str) -> Outcome:
        """Return the outcome of a process without a report; a negative exit code is the number of a signal."""
        if exitcode >= 0:
            return cls(rank, "exit", time, exitcode=exitcode, message=message)
        known = {member.value: member.name for member in signal.Signals}
        return cls(rank, "signal", time, signal=known.get(-exitcode, f"signal {-exitcode}"), exitcode=exitcode)

    @property
    def headline(self) -> str:
        """Return one line on how this rank ended."""
        return f"rank {self.rank}: {self.cause}"

    @property
    def cause(self) -> str:
        """Return the reason: exception, exit code or signal."""
        if self.kind == "exception":
            first_line = self.message.strip().splitlines()[0] if self.message.strip() else "(no message)"
            return f"{self.type}: {first_line}"
        if self.kind == "signal":
            hint = " (the system may do this when memory runs out)" if self.signal == "SIGKILL" else ""
            return f"killed by {self.signal}{hint}"
        if self.kind == "exit":
            return f"exited with code {self.exitcode}: {self.message}"
        if self.kind == "timeout":
            return f"still running at the deadline{self._where()}"
        if self.kind == "ended":
            return f"stopped because another rank had failed{self._where()}"
        return "returned"

    def _where(self) -> str:
        """The innermost line of user code in the main thread, which faulthandler prints last."""
        main_thread = self.stack.rstrip().rpartition("\n\n")[2]
        frames = [line.strip() for line in main_thread.splitlines() if line.strip().startswith("File ")]
        own = [frame for frame in frames if not any(place in frame for place in _NOT_THE_USERS)]
        return f", in {(own or frames)[0]}" if frames else f" ({self.stack})" if self.stack else ""

    @property
    def lost_a_peer(self) -> bool:
        """Whether the rank failed only because another rank had failed.

        Such a rank is the cause of a failure only if no other rank can be.
        """
        if self.kind != "exception":
            return False
        return lost_a_peer(self.message) if self.consequence is None else self.consequence == "wholly"


def first_failure(outcomes: Iterable[Outcome]) -> Outcome | None:
    """Return the outcome that explains the others; None if every rank returned.

    Ranks with a failure of their own come first, ordered by time; then ranks that failed while they handled the failure
    of another rank; then ranks that only lost a peer, ranks that timed out, and ranks that were stopped.
    """

    def order(outcome: Outcome) -> tuple[int, float]:
        if outcome.kind == "ended":
            return 4, outcome.time
        if outcome.kind == "timeout":
            return 3, outcome.time
        return 2 if outcome.lost_a_peer else int(outcome.consequence == "partly"), outcome.time

    return min((outcome for outcome in outcomes if not outcome.ok), key=order, default=None)


# --- The worlds of `run_world` ---


@dataclass(frozen=True)
class WorldResult:
    """The outcomes and the output of all ranks of a world."""

    outcomes: tuple[Outcome, ...]
    stdout: tuple[str, ...]
    stderr: tuple[str, ...]
    seconds: float

    @property
    def values(self) -> list[Any]:
        """The return values of the ranks; None for a failed rank."""
        return [outcome.value for outcome in self.outcomes]

    @property
    def ok(self) -> bool:
        """Whether every rank returned."""
        return all(outcome.ok for outcome in self.outcomes)

    @property
    def root_cause(self) -> Outcome | None:
        """The outcome that explains the failure; None if every rank returned."""
        return first_failure(self.outcomes)

    def report(self) -> str:
        """Return the failure as text: the root cause in full, then one line per other rank."""
        cause = self.root_cause
        if cause is None:
            return f"all {len(self.outcomes)} ranks returned in {self.seconds:.1f} s"
        hung = [other for other in self.outcomes if other.kind == "timeout" and other is not cause]
        parts = [f"{cause.headline} (world of {len(self.outcomes)}, {self.seconds:.1f} s)"]
        parts += [text.rstrip() for text in (cause.traceback, _titled("stacks", cause)) if text]
        parts += [tail(f"stderr of rank {cause.rank}", self.stderr[cause.rank])]
        parts += [tail(f"stdout of rank {cause.rank}", self.stdout[cause.rank])]
        parts += [_titled("stacks", other) for other in hung]
        parts += [other.headline for other in self.outcomes if other is not cause]
        return "\n".join(part for part in parts if part)


class WorldError(ColonnadeError, RuntimeError):
    """A rank of a world failed. `result` is the complete result, `rank` the rank that failed first."""

    def __init__(self, result: WorldResult) -> None:
        super().__init__(result.report())
        self.result = result
        self.rank = result.root_cause.rank if result.root_cause else None


# --- The jobs of `colonnade run` ---


def write_failure(file: Path, fields: Mapping[str, Any], status: int) -> None:
    """Write the fields of an `Outcome` for the launcher, in a format that the tools of torchrun can read, too.

    The write is atomic, because the launcher may stop this rank at the same time. `status` is the exit status with
    which this rank is about to exit. It is written because the launcher may stop the rank before.
    """
    now = time.time()
    extra = {"py_callstack": fields["traceback"], "timestamp": str(int(now))}
    content = {
        "message": {"message": f"{fields['type']}: {fields['message']}", "extraInfo": extra},
        "outcome": {**fields, "exitcode": status, "time": now},
    }
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    scratch.write_text(json.dumps(content))
    scratch.replace(file)


def read_failure(rank: int, file: Path) -> Outcome | None:
    """Return the failure note of a rank; None if there is none."""
    if not file.is_file():
        return None
    fields = json.loads(file.read_text())["outcome"]
    return Outcome(rank=rank, **{**fields, "named_ranks": tuple(fields.get("named_ranks", ()))})


def silent_failure(rank: int, exitcode: int, seen: float) -> Outcome:
    """Return the outcome of a rank without a failure note; `seen` is the time when the launcher noticed its end."""
    if exitcode == -signal.SIGTERM:
        return Outcome(rank, "ended", seen, exitcode=exitcode)
    return Outcome.of_exit(rank, exitcode, seen - _HEAD_START, "without a traceback")


def launch_report(outcomes: Mapping[int, Outcome], stderr: Mapping[int, Path]) -> tuple[str, int]:
    """Return the report on the failed ranks, and the exit status of the first failure.

    The report lists the other ranks first. The first failure follows: a line that names it, then its traceback; or,
    without a traceback, the end of its stderr, then that line.
    """
    first = first_failure(outcomes.values())
    assert first is not None
    others = [outcomes[rank] for rank in sorted(outcomes) if rank != first.rank]

    # One line per rank with a failure of its own, and one line for all ranks that only lost a peer.
    lost = [outcome.rank for outcome in others if outcome.lost_a_peer or outcome.kind == "ended"]
    lines = [outcome.headline for outcome in others if outcome.rank not in lost]
    gone = f"rank {first.rank}"
    if first.lost_a_peer:
        # The rank that failed wrote no note: it had no time to, or it is on another host.
        lost = [rank for rank in lost if rank not in first.named_ranks]
        gone = f"rank {listed(first.named_ranks)}" if first.named_ranks else "another rank"
    if lost:
        ranks = f"rank {lost[0]}" if len(lost) == 1 else f"ranks {listed(lost)}"
        lines.append(f"{ranks}: ended because {gone} was gone")

    blame = f"colonnade: {who_failed(first)}, exit status {exit_status(first)}"
    if first.traceback:
        more = "".join(f"; details: colonnade explain {code}" for code in codes_in(first.message)[-1:])
        shown = [blame + more, first.traceback]
    else:
        log = stderr[first.rank]
        words = without_frames(log.read_text(errors="replace")) if log.is_file() else ""
        shown = [tail(f"stderr of rank {first.rank}", words), f"{blame}: {first.cause}"]
    return "\n".join(part for part in [*lines, *shown] if part).rstrip(), exit_status(first)


def who_failed(first: Outcome) -> str:
    """Describe the rank that failed first. `first` may be a rank that only noticed the failure."""
    if not first.lost_a_peer:
        return f"rank {first.rank} failed first"
    if first.named_ranks:
        ranks = f"rank {first.named_ranks[0]}" if len(first.named_ranks) == 1 else f"ranks {listed(first.named_ranks)}"
        return f"{ranks} failed first, according to rank {first.rank}"
    return (
        f"rank {first.rank} lost another rank, and no rank on this host reported a failure of its own: read the output of the "
        f"other hosts, and check for a killed process"
    )


def exit_status(outcome: Outcome) -> int:
    """Return the exit status as a shell reports it, also for a rank that was stopped before it could exit."""
    code = outcome.exitcode or 0
    return 128 - code if code < 0 else code


# --- Texts ---


def without_frames(text: str) -> str:
    """Shorten the C++ stacks of torch in a text. These stacks only show places inside torch."""
    return _FRAMES.sub(lambda found: f"({found[0].count(chr(10))} lines of a torch stack)\n", text)


def _titled(title: str, outcome: Outcome) -> str:
    return f"--- {title} of rank {outcome.rank}\n{outcome.stack.rstrip()}" if outcome.stack else ""


def tail(title: str, text: str) -> str:
    """Return the last lines of a log under a title; empty for an empty log."""
    lines = text.rstrip().splitlines()
    if not lines:
        return ""
    shown = f", last {_TAIL_LINES} of {len(lines)} lines" if len(lines) > _TAIL_LINES else ""
    return "\n".join([f"--- {title}{shown}", *lines[-_TAIL_LINES:]])


# --- Inside a rank ---


def end_with_parent() -> None:
    """Make the kernel kill this process when its parent dies for any reason."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def description(error: BaseException, starters: Collection[str], fold_library: bool = False) -> dict[str, Any]:
    """Return the fields of an `Outcome` for an exception.

    Args:
        error: the exception.
        starters: files that started the rank; their leading frames are left out of the traceback.
        fold_library: leave out the trailing frames of this package if the error is a ColonnadeError.
    """
    # Before the traceback is made: it copies the notes of the error.
    waits = sys.modules.get("colonnade.comm.waits")  # only in a process that has joined a world
    if waits is not None:
        waits.explain_end(error)
    kind = type(error)
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in starters:
        trace = trace.tb_next
    shown = traceback.TracebackException(kind, error, trace or error.__traceback__, compact=True)
    if fold_library and isinstance(error, ColonnadeError):
        # A ColonnadeError is raised on purpose and its message is complete: the last line of the user's code says where, and
        # frames of the library below it would only hide that line. An error without user code keeps all frames.
        frames = list(shown.stack)
        while frames and frames[-1].filename.startswith(_PACKAGE):
            frames.pop()
        shown.stack = traceback.StackSummary.from_list(frames or shown.stack)
    consequence, ranks = consequence_of(error)
    return {
        "kind": "exception",
        "type": kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}",
        "message": str(error),
        "traceback": "".join(shown.format()),
        "consequence": consequence,
        "named_ranks": ranks,
    }

"""How the ranks of a world ended: one outcome per rank, which of them failed first, and the reports. No torch.

A rank describes its own failure (`description`). A rank of `colonnade run` leaves it in a file for the launcher
(`write_failure`, `read_failure`); one of `run_world` sends it to its parent. `first_failure` decides who is to blame.
`WorldResult.report` tells it to a test, `launch_report` to the user of `colonnade run`.
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
"""Ends what the launcher shows of a rank's stderr as it comes: the traceback after it is shown last, and once."""

# A rank that dies without leaving a note is noticed by its peers before the launcher sees it is gone, so their notes are
# older than its death seems to be: the agent polls, and counts whole seconds.
_HEAD_START = 2.0

_FRAMES = re.compile(
    r"(?:^(?:\[rank \d+\] )?(?:Exception raised from|frame #\d+:|C\+\+ CapturedTraceback:|#\d+ ).*\n)+", re.MULTILINE
)


@dataclass(frozen=True)
class Outcome:
    """How one rank ended.

    `kind` is "value" (the function returned `value`), "exception" (`type`, `message`, `traceback`),
    "signal" (`signal` names it), "exit" (the process left with `exitcode` and `message` says when),
    "timeout" (it was still running at the deadline) or "ended" (another rank had failed, so it was
    stopped). `stack` holds the Python stacks of a rank that had to be stopped; `time` is the monotonic
    clock when it ended. `consequence` tells whether an exception only follows from the failure of other ranks, and
    `told_of` names these, where it says so; without it, the message decides.
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
    told_of: tuple[int, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the function returned."""
        return self.kind == "value"

    @classmethod
    def of_exit(cls, rank: int, exitcode: int, time: float, message: str) -> Outcome:
        """Return the outcome of a process that left no report; a negative exit code is that of a signal."""
        if exitcode >= 0:
            return cls(rank, "exit", time, exitcode=exitcode, message=message)
        known = {member.value: member.name for member in signal.Signals}
        return cls(rank, "signal", time, signal=known.get(-exitcode, f"signal {-exitcode}"), exitcode=exitcode)

    @property
    def headline(self) -> str:
        """Say in one line how this rank ended."""
        return f"rank {self.rank}: {self.cause}"

    @property
    def cause(self) -> str:
        """Say why it ended: its exception, exit code or signal."""
        if self.kind == "exception":
            first_line = self.message.strip().splitlines()[0] if self.message.strip() else "(no message)"
            return f"{self.type}: {first_line}"
        if self.kind == "signal":
            hint = " (the system does that when memory runs out)" if self.signal == "SIGKILL" else ""
            return f"killed by {self.signal}{hint}"
        if self.kind == "exit":
            return f"left with exit code {self.exitcode}: {self.message}"
        if self.kind == "timeout":
            return f"still running at the deadline{self._where()}"
        if self.kind == "ended":
            return f"stopped because another rank had failed{self._where()}"
        return "returned"

    def _where(self) -> str:
        """Name the innermost line of the user's in the main thread, which faulthandler prints last."""
        main_thread = self.stack.rstrip().rpartition("\n\n")[2]
        frames = [line.strip() for line in main_thread.splitlines() if line.strip().startswith("File ")]
        own = [frame for frame in frames if not any(place in frame for place in _NOT_THE_USERS)]
        return f", in {(own or frames)[0]}" if frames else f" ({self.stack})" if self.stack else ""

    @property
    def lost_a_peer(self) -> bool:
        """Whether it failed only because another rank had failed: never the cause while another rank has one."""
        if self.kind != "exception":
            return False
        return lost_a_peer(self.message) if self.consequence is None else self.consequence == "wholly"


def first_failure(outcomes: Iterable[Outcome]) -> Outcome | None:
    """Return the outcome that explains the others, or None when every rank returned.

    A rank that was stopped explains nothing while another failed by itself, and neither does one that only
    noticed a lost peer, or was told of its failure. Next come ranks that failed by themselves while they dealt with
    that of another; among the rest it is the first by time.
    """

    def blame(outcome: Outcome) -> tuple[int, float]:
        if outcome.kind == "ended":
            return 4, outcome.time
        if outcome.kind == "timeout":
            return 3, outcome.time
        return 2 if outcome.lost_a_peer else int(outcome.consequence == "partly"), outcome.time

    return min((outcome for outcome in outcomes if not outcome.ok), key=blame, default=None)


# --- The worlds of `run_world` ---


@dataclass(frozen=True)
class WorldResult:
    """All ranks of one world: what they returned, how they ended and what they printed."""

    outcomes: tuple[Outcome, ...]
    stdout: tuple[str, ...]
    stderr: tuple[str, ...]
    seconds: float

    @property
    def values(self) -> list[Any]:
        """What the function returned on each rank; None for a rank that failed."""
        return [outcome.value for outcome in self.outcomes]

    @property
    def ok(self) -> bool:
        """Whether every rank returned."""
        return all(outcome.ok for outcome in self.outcomes)

    @property
    def root_cause(self) -> Outcome | None:
        """Return the outcome that explains the failure, or None when every rank returned."""
        return first_failure(self.outcomes)

    def report(self) -> str:
        """Return the failure as text: the root cause with all that is known, then a line per other rank."""
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
    """A world in which a rank failed; `result` holds all of it, `rank` is the one that failed first."""

    def __init__(self, result: WorldResult) -> None:
        super().__init__(result.report())
        self.result = result
        self.rank = result.root_cause.rank if result.root_cause else None


# --- The jobs of `colonnade run` ---


def write_failure(file: Path, fields: Mapping[str, Any], status: int) -> None:
    """Leave the fields of an `Outcome` for the launcher, in a form that torchrun's own tools read as well.

    Whole or not at all: the launcher may be ending this rank at the same time. `status` is the exit status that
    the rank is about to return; it may be ended before it gets there.
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
    """Return what a rank left, or None if it left nothing."""
    if not file.is_file():
        return None
    fields = json.loads(file.read_text())["outcome"]
    return Outcome(rank=rank, **{**fields, "told_of": tuple(fields.get("told_of", ()))})


def silent_failure(rank: int, exitcode: int, seen: float) -> Outcome:
    """Return the outcome of a rank that left nothing; `seen` is when the launcher noticed."""
    if exitcode == -signal.SIGTERM:
        return Outcome(rank, "ended", seen, exitcode=exitcode)
    return Outcome.of_exit(rank, exitcode, seen - _HEAD_START, "it left no traceback")


def launch_report(outcomes: Mapping[int, Outcome], stderr: Mapping[int, Path]) -> tuple[str, int]:
    """Return the text on the failed ranks and the exit status of the first.

    The other ranks; then the first failure: the line that blames it and its traceback, or the end of its stderr and that line.
    """
    first = first_failure(outcomes.values())
    assert first is not None
    others = [outcomes[rank] for rank in sorted(outcomes) if rank != first.rank]

    # A line for each rank that failed by itself, and one for all those that only lost a peer.
    lost = [outcome.rank for outcome in others if outcome.lost_a_peer or outcome.kind == "ended"]
    lines = [outcome.headline for outcome in others if outcome.rank not in lost]
    gone = f"rank {first.rank}"
    if (
        first.lost_a_peer
    ):  # the rank that failed is another one, which had no time to leave a note, or is on another host
        lost = [rank for rank in lost if rank not in first.told_of]
        gone = f"rank {listed(first.told_of)}" if first.told_of else "another rank"
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


def exit_status(outcome: Outcome) -> int:
    """Return the exit status that a shell would give, or would have given had the rank not been ended."""
    code = outcome.exitcode or 0
    return 128 - code if code < 0 else code


# --- Texts ---


def without_frames(text: str) -> str:
    """Fold the stacks that torch's C++ writes: they say where in torch, never what went wrong."""
    return _FRAMES.sub(lambda found: f"({found[0].count(chr(10))} lines of torch's stack)\n", text)


def _titled(title: str, outcome: Outcome) -> str:
    return f"--- {title} of rank {outcome.rank}\n{outcome.stack.rstrip()}" if outcome.stack else ""


def tail(title: str, text: str) -> str:
    """Return the last lines of a log under a title, or nothing where there are none."""
    lines = text.rstrip().splitlines()
    if not lines:
        return ""
    cut = f", last {_TAIL_LINES} of {len(lines)} lines" if len(lines) > _TAIL_LINES else ""
    return "\n".join([f"--- {title}{cut}", *lines[-_TAIL_LINES:]])


# --- Inside a rank ---


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent dies, however that dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def description(error: BaseException, starters: Collection[str], fold_library: bool = False) -> dict[str, Any]:
    """The fields of an `Outcome` for an exception.

    Args:
        error: the exception.
        starters: files that started the rank; their leading frames are left out of the traceback.
        fold_library: leave out the trailing frames of this package if the error is a ColonnadeError.
    """
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
    waits = sys.modules.get("colonnade.comm.waits")  # of a process that has joined a world, with torch
    if waits is not None:
        waits.explain_end(error)
    consequence, ranks = consequence_of(error)
    return {
        "kind": "exception",
        "type": kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}",
        "message": str(error),
        "traceback": "".join(shown.format()),
        "consequence": consequence,
        "told_of": ranks,
    }

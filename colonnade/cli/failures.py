"""How ranks of `colonnade run` failed: the note that each leaves, and the report that ends in the first traceback."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from colonnade.testing.outcome import Outcome, first_failure, tail

HIDDEN_FROM_HERE = b"\x1e"
"""Ends what the launcher shows of a rank's stderr as it comes: the traceback after it is shown last, and once."""

# A rank that dies without a word is noticed by its peers before the launcher sees it is gone, so their notes are
# older than its death seems to be: the agent polls, and counts whole seconds.
_HEAD_START = 2.0


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
    return Outcome(rank=rank, **json.loads(file.read_text())["outcome"]) if file.is_file() else None


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

    A line for each other rank, then the first failure, ending in its traceback or its last lines on stderr.
    """
    first = first_failure(outcomes.values())
    assert first is not None
    others = [outcomes[rank].headline for rank in sorted(outcomes) if rank != first.rank]
    why = "" if first.traceback else f": {first.cause}"
    verdict = f"colonnade: rank {first.rank} failed first, exit status {exit_status(first)}{why}"
    log = stderr[first.rank]
    last = tail(f"stderr of rank {first.rank}", log.read_text(errors="replace")) if log.is_file() else ""
    return "\n".join([*others, verdict, first.traceback or last]).rstrip(), exit_status(first)

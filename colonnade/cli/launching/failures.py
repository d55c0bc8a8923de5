"""How ranks of `colonnade run` failed: the note that each leaves, and the report that ends in the first traceback."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from colonnade.error_pages import codes_in
from colonnade.errors import listed
from colonnade.testing.outcome import Outcome, first_failure, tail

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

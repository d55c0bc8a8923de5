"""Which rank failed first, and the report that ends in its traceback."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from colonnade.cli._record import Record

_TAIL_LINES = 20
# A rank that dies without a word is noticed by its peers before the launcher sees it is gone, so their
# records are older than its death seems to be: the agent polls, and counts whole seconds.
_HEAD_START = 2.0


@dataclass(frozen=True)
class Failure:
    """How one rank ended: `exit_code` is negative for a signal, `seen` is when the launcher noticed."""

    rank: int
    exit_code: int
    seen: float
    record: Record | None
    stderr: Path

    @property
    def was_ended(self) -> bool:
        """Whether it looks like a rank that the launcher stopped because another had failed."""
        return self.record is None and self.exit_code == -signal.SIGTERM

    @property
    def status(self) -> int:
        """Return the exit status a shell would give, or would have given had the rank not been ended."""
        if self.record is not None:
            return self.record.status
        return 128 - self.exit_code if self.exit_code < 0 else self.exit_code

    @property
    def headline(self) -> str:
        """Say in one line what became of the rank."""
        return f"rank {self.rank}: {'ended by the launcher' if self.was_ended else self.cause}"

    @property
    def cause(self) -> str:
        """Say why it ended: its exception, exit code or signal."""
        if self.record is not None:
            return self.record.headline
        if self.exit_code == -signal.SIGKILL:
            return "killed by SIGKILL (the system does that when memory runs out)"
        if self.exit_code >= 0:
            return f"left with exit code {self.exit_code}"
        try:
            return f"killed by {signal.Signals(-self.exit_code).name}"
        except ValueError:
            return f"killed by signal {-self.exit_code}"


def first_failure(failures: Sequence[Failure]) -> Failure:
    """Return the failure that explains the others: the earliest that was not the launcher's doing."""
    return min(failures, key=lambda failure: (failure.was_ended, _began(failure)))


def report(failures: Sequence[Failure]) -> str:
    """Return a line for each other rank, then the first failure, ending in its traceback or last words."""
    first = first_failure(failures)
    by_rank = sorted(failures, key=lambda failure: failure.rank)
    others = [other.headline for other in by_rank if other is not first]
    return "\n".join([*others, _verdict(first), _last_words(first)]).rstrip()


def _began(failure: Failure) -> float:
    return failure.record.time if failure.record is not None else failure.seen - _HEAD_START


def _verdict(first: Failure) -> str:
    why = "" if first.record is not None and first.record.traceback else f": {first.cause}"
    return f"colonnade: rank {first.rank} failed first, exit status {first.status}{why}"


def _last_words(first: Failure) -> str:
    if first.record is not None and first.record.traceback:
        return first.record.traceback
    text = first.stderr.read_text(errors="replace") if first.stderr.is_file() else ""
    lines = text.rstrip().splitlines()[-_TAIL_LINES:]
    return "\n".join([f"its last lines on stderr ({first.stderr.name}):", *lines]) if lines else ""

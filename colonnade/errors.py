"""What can go wrong, as types a user can catch.

Every message gives the value that was met, what is allowed, and the next step.
"""

from __future__ import annotations

import difflib
import os
import re
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal


class ColonnadeError(Exception):
    """Base of every error that Colonnade raises on purpose. A message that ends in a code, [C040], has a page:
    `colonnade explain C040`."""

    def __init__(self, message: object = "", *, code: str | None = None, ranks: Iterable[int] = ()) -> None:
        super().__init__(message if code is None else f"{message} [{code}]")
        inside = re.search(r"\[(C\d{3})\]$", str(message))  # of an error that came from another rank
        self.code = code or (inside[1] if inside else None)
        self.ranks = tuple(ranks)
        """The other ranks that failed, where this error only tells of their failure; empty for a failure of this rank."""


class ConfigError(ColonnadeError, ValueError):
    """A configuration that cannot be used, or that is not the same on all ranks."""


class RegistryError(ColonnadeError, LookupError):
    """An unknown or twice-registered name."""


class LayoutError(ColonnadeError, ValueError):
    """Sizes or rank lists that do not make a world."""


class ContextError(ColonnadeError, RuntimeError):
    """A group, rank or stream was asked for that this context does not have."""


class LaunchError(ColonnadeError, RuntimeError):
    """The world could not be started."""


class PlacementError(ColonnadeError, ValueError):
    """A parameter whose placement is missing, contradictory or does not add up."""


class LedgerError(ColonnadeError, RuntimeError):
    """A gradient reduction that nobody does, that two do, or that is done with another divisor."""


class GradientError(ColonnadeError, RuntimeError):
    """Gradients that cannot be synchronised, clipped or applied as asked."""


class ScheduleError(ColonnadeError, ValueError):
    """A schedule or a table of actions that cannot run."""


class ParityError(ColonnadeError, AssertionError):
    """A parallel result that differs from one process."""


class TrainerError(ColonnadeError, RuntimeError):
    """Training cannot go on; raised on every rank."""


class HookError(TrainerError):
    """A hook raised; says which one, at which point of its life cycle, at which step. Raised on every rank."""


class CheckpointError(ColonnadeError, RuntimeError):
    """A checkpoint that cannot be written or must not be loaded."""


@contextmanager
def as_checkpoint_errors(doing: str) -> Iterator[None]:
    """Turn every error of the block into a CheckpointError that says what was being done."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{doing}: {type(error).__name__}: {error}") from error


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name closest to `name`, or None when nothing is close."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    found = difflib.get_close_matches(str(name).lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the nearest known name, or an empty string."""
    close = nearest(name, known)
    return f" Did you mean {close!r}?" if close else ""


def listed(names: Iterable[object]) -> str:
    """Return the names as one readable line, or "none"."""
    return ", ".join(str(name) for name in names) or "none"


Consequence = Literal["no", "partly", "wholly"]

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_NOT_THE_USERS = ("site-packages", "dist-packages", os.path.dirname(os.__file__), "<frozen", _PACKAGE)
_LOST_A_PEER = re.compile(
    r"connection (closed|reset|refused|was likely closed)|broken pipe|socket (closed|error)|pair closure|connectFullMesh"
    r"|failed to pass monitoredBarrier|Pair is not connected|timed out waiting|wait timeout|left during the"
    r"|did not come to the|failed to recv, got|remote process exited|communicator was aborted|ncclRemoteError"
    r"|caught collective operation timeout",
    re.IGNORECASE,
)


def lost_a_peer(text: str) -> bool:
    """Whether this is what a healthy rank says when another rank has gone, or does not come."""
    return bool(_LOST_A_PEER.search(text))


def consequence_of(error: BaseException) -> tuple[Consequence, tuple[int, ...]]:
    """Whether an error only follows from the failure of other ranks, and which ones, where the error says so.

    "partly" where this rank failed by itself too, before or while it dealt with the other failure.
    """
    own = following = False
    ranks: tuple[int, ...] = ()
    for each in _told(error):
        from_others = getattr(each, "ranks", ()) if isinstance(each, ColonnadeError) else ()
        if from_others or lost_a_peer(str(each)):
            following, ranks = True, ranks or tuple(from_others)
        elif not isinstance(each, (SystemExit, KeyboardInterrupt)):
            own = True
    if not following:
        return "no", ()
    return ("partly" if own else "wholly"), ranks


def _told(error: BaseException) -> Iterator[BaseException]:
    """The errors that an error stands for: its cause, if it was raised from one, else itself and the one being handled."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        if each.__cause__ is not None and not (isinstance(each, ColonnadeError) and each.ranks):
            each = each.__cause__
            continue
        yield each
        each = None if each.__suppress_context__ else each.__context__


def users_line(error: BaseException) -> str:
    """Where an error that is not Colonnade's own began, as `File "train.py", line 14, in criterion`; else nothing."""
    first = error
    while first.__cause__ is not None:
        first = first.__cause__
    if isinstance(first, ColonnadeError):
        return ""
    frames = traceback.extract_tb(first.__traceback__)
    own = [frame for frame in frames if not any(place in frame.filename for place in _NOT_THE_USERS)]
    return f'File "{own[-1].filename}", line {own[-1].lineno}, in {own[-1].name}' if own else ""


def with_users_line(error: BaseException, longest: int | None = None) -> str:
    """The text of an error, at most `longest` characters, with the user's line that it began at, as other ranks are told."""
    text, line = str(error), users_line(error)
    if longest is not None and len(text) > longest:
        text = text[:longest] + "..."
    if not line or line in text:
        return text
    body, code = re.fullmatch(r"(.*?)( \[C\d{3}\])?", text, re.DOTALL).groups("")  # type: ignore[union-attr]
    return f"{body} ({line}){code}"

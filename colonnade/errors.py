"""The exception classes of Colonnade, helpers for their messages, and the recognition of errors that are caused by other ranks.

Every message gives the value found, the allowed values and the next step.
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
    """Base class of all errors that Colonnade raises on purpose.

    A message that ends in a code, such as [C040], has a page: `colonnade explain C040`.
    """

    def __init__(self, message: object = "", *, code: str | None = None, ranks: Iterable[int] = ()) -> None:
        super().__init__(message if code is None else f"{message} [{code}]")
        inside = re.search(r"\[(C\d{3})\]$", str(message))  # the code of an error from another rank
        self.code = code or (inside[1] if inside else None)
        self.ranks = tuple(ranks)
        """The failed ranks, if this error only reports their failure; empty for a failure of this rank."""


class ConfigError(ColonnadeError, ValueError):
    """A config or argument that is invalid, or that differs between ranks."""


class RegistryError(ColonnadeError, LookupError):
    """An unknown or twice-registered name."""


class LayoutError(ColonnadeError, ValueError):
    """Parallel sizes or rank lists that do not fit the number of ranks."""


class ContextError(ColonnadeError, RuntimeError):
    """A request for a group, rank or random stream that this context does not have."""


class LaunchError(ColonnadeError, RuntimeError):
    """Ranks that could not be started."""


class PlacementError(ColonnadeError, ValueError):
    """A placement that is missing, contradictory or inconsistent over the ranks."""


class LedgerError(ColonnadeError, RuntimeError):
    """A gradient reduction that has no handler, has two handlers, or uses the wrong divisor."""


class GradientError(ColonnadeError, RuntimeError):
    """Gradients that cannot be reduced, clipped or applied as requested."""


class ScheduleError(ColonnadeError, ValueError):
    """A pipeline schedule or action table that cannot run."""


class ParityError(ColonnadeError, AssertionError):
    """A parallel result that differs from a single-process run."""


class TrainerError(ColonnadeError, RuntimeError):
    """An error that ends training; raised on every rank."""


class HookError(TrainerError):
    """An exception in a hook, with the hook point and the step; raised on every rank."""


class CheckpointError(ColonnadeError, RuntimeError):
    """A checkpoint that cannot be written or loaded."""


@contextmanager
def as_checkpoint_errors(doing: str) -> Iterator[None]:
    """Inside the block, convert every exception to a CheckpointError whose message starts with `doing`."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{doing}: {type(error).__name__}: {error}") from error


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name closest to `name`, or None if none is close."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    found = difflib.get_close_matches(str(name).lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The text " Did you mean 'x'?" for the nearest known name, or an empty string."""
    close = nearest(name, known)
    return f" Did you mean {close!r}?" if close else ""


def listed(names: Iterable[object]) -> str:
    """The names in one line, separated by commas, or "none"."""
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
    """Whether `text` is a typical error message of a healthy rank after another rank has exited or did not arrive."""
    return bool(_LOST_A_PEER.search(text))


def consequence_of(error: BaseException) -> tuple[Consequence, tuple[int, ...]]:
    """Return whether an error is only a consequence of a failure on other ranks, and the numbers of these ranks if the error
    names them.

    "partly": this rank also failed for a reason of its own, before or while it handled the failure of another rank.
    """
    own = following = False
    ranks: tuple[int, ...] = ()
    # Walk the chain of exceptions: an exception with a cause stands for its cause (unless it reports other ranks), any other
    # for itself and for the exception that was being handled. Chains may contain cycles.
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        from_others = getattr(link, "ranks", ()) if isinstance(link, ColonnadeError) else ()
        if link.__cause__ is not None and not from_others:
            link = link.__cause__
            continue
        if from_others or lost_a_peer(str(link)):
            following, ranks = True, ranks or tuple(from_others)
        elif not isinstance(link, (SystemExit, KeyboardInterrupt)):
            own = True
        link = None if link.__suppress_context__ else link.__context__
    if not following:
        return "no", ()
    return ("partly" if own else "wholly"), ranks


def users_line(error: BaseException) -> str:
    """The innermost line of user code in the traceback of `error`, such as `File "train.py", line 14, in criterion`; empty for
    a ColonnadeError."""
    first = error
    while first.__cause__ is not None:
        first = first.__cause__
    if isinstance(first, ColonnadeError):
        return ""
    frames = traceback.extract_tb(first.__traceback__)
    own = [frame for frame in frames if not any(place in frame.filename for place in _NOT_THE_USERS)]
    return f'File "{own[-1].filename}", line {own[-1].lineno}, in {own[-1].name}' if own else ""


def with_users_line(error: BaseException, longest: int | None = None) -> str:
    """The text of an error for other ranks: at most `longest` characters, and the innermost line of user code."""
    text, line = str(error), users_line(error)
    if longest is not None and len(text) > longest:
        text = text[:longest] + "..."
    if not line or line in text:
        return text
    body, code = re.fullmatch(r"(.*?)( \[C\d{3}\])?", text, re.DOTALL).groups("")  # type: ignore[union-attr]
    return f"{body} ({line}){code}"

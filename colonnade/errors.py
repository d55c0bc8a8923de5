"""What can go wrong, as types a user can catch.

Every message gives the value that was met, what is allowed, and the next step.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


class ColonnadeError(Exception):
    """Base of every error that Colonnade raises on purpose. A message that ends in a code, [C040], has a page:
    `colonnade explain C040`."""

    def __init__(self, message: object = "", *, code: str | None = None) -> None:
        super().__init__(message if code is None else f"{message} [{code}]")
        inside = re.search(r"\[(C\d{3})\]$", str(message))  # of an error that came from another rank
        self.code = code or (inside[1] if inside else None)


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

"""What every process of a world does, whoever started it: end with its parent, and tell how it failed. No torch."""

from __future__ import annotations

import ctypes
import signal
import sys
import traceback
from collections.abc import Collection
from types import TracebackType
from typing import Any

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent dies, however that dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def description(error: BaseException, starters: Collection[str]) -> dict[str, Any]:
    """Return the fields of an `Outcome` for what was raised, without the leading frames of the files that started it."""
    kind = type(error)
    trace = _users_part(error.__traceback__, starters)
    return {
        "kind": "exception",
        "type": kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}",
        "message": str(error),
        "traceback": "".join(traceback.format_exception(kind, error, trace)),
    }


def _users_part(trace: TracebackType | None, starters: Collection[str]) -> TracebackType | None:
    """Drop the leading frames of these files, unless there are no others."""
    own = trace
    while own is not None and own.tb_frame.f_code.co_filename in starters:
        own = own.tb_next
    return own or trace

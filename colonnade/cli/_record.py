"""The note a failing rank leaves for the launcher, in the form torchrun's own tools read as well."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

# Ends what the launcher shows of a rank's stderr as it comes: the traceback after it is shown last, and once.
HIDDEN_FROM_HERE = b"\x1e"


@dataclass(frozen=True)
class Record:
    """One rank's failure; `traceback` is empty when the script asked to exit.

    `status` is the exit status it was about to return: the launcher may end the rank before it gets there.
    """

    headline: str
    traceback: str
    status: int
    time: float


def write_record(path: Path, headline: str, traceback: str, status: int) -> None:
    """Write the record whole or not at all: the launcher may be ending this rank at the same time."""
    now = time.time()
    content = {
        "message": {
            "message": headline,
            "extraInfo": {"py_callstack": traceback, "timestamp": str(int(now))},
        },
        "status": status,
        "time": now,
    }
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(json.dumps(content))
    scratch.replace(path)


def read_record(path: Path) -> Record | None:
    """Return the record a rank left, or None if it died without one."""
    if not path.is_file():
        return None
    content = json.loads(path.read_text())
    message = content["message"]
    traceback = message["extraInfo"]["py_callstack"]
    return Record(message["message"], traceback, content["status"], content["time"])

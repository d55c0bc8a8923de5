"""What a rank does when an error ends it under a launcher that is not ours: torchrun is told which rank failed first.

torchrun ends all ranks of a host when it has seen one leave, and calls that one the root cause. A rank that only lost another
one therefore leaves a little later, and each leaves its traceback in the file that torchrun reads.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType

from colonnade.comm.waits import explain_end
from colonnade.constants import FOLLOWS_AFTER
from colonnade.errors import consequence_of

_installed = False


def install() -> None:
    """From now on, tell torchrun of an error that ends this process. `colonnade run` and `run_world` ask the rank by themselves."""
    global _installed
    if _installed or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    _installed, before = True, sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        explain_end(error)
        before(kind, error, trace)
        with contextlib.suppress(OSError):
            _tell(error, trace)

    sys.excepthook = hook


def _tell(error: BaseException, trace: TracebackType | None) -> None:
    later = FOLLOWS_AFTER if consequence_of(error)[0] == "wholly" else 0.0
    if later:
        atexit.register(_stay, later)
    file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE") or os.devnull)
    if file.exists():  # the script's own `record` wrote it, or there is none
        return
    told = {
        "py_callstack": "".join(traceback.format_exception(type(error), error, trace)),
        "timestamp": str(int(time.time() + later)),
    }
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    scratch.write_text(json.dumps({"message": {"message": f"{type(error).__qualname__}: {error}", "extraInfo": told}}))
    scratch.replace(file)


def _stay(seconds: float) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    time.sleep(seconds)

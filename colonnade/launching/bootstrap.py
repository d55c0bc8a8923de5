"""The first thing a rank of `colonnade run` executes: it dies with the launcher and records how it failed."""

from __future__ import annotations

import faulthandler
import os
import runpy
import signal
import socket
import sys
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

from colonnade.constants import FOLLOWS_AFTER
from colonnade.launching.failures import HIDDEN_FROM_HERE, write_failure
from colonnade.launching.outcome import description, end_with_parent

LAUNCHER = "COLONNADE_LAUNCHER_PID"
_INTERRUPT_SECONDS = 0.7
_STARTERS = (__file__, runpy.__file__, "<frozen runpy>")


def main() -> None:
    """Run the command line KIND NAMES TARGET ARGUMENTS...

    KIND is "script" or "module"; NAMES is "plain", or "as-colossalai" to alias that package first.
    """
    kind, names, target, *arguments = sys.argv[1:]
    _die_with_launcher()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    _obey_interrupts()
    sys.argv = [target, *arguments]
    try:
        if names == "as-colossalai":
            from colonnade.compat import install

            install()
        with _verified():
            _run(kind, target)
    except SystemExit as error:
        if error.code not in (None, 0):
            status = error.code % 256 if isinstance(error.code, int) else 1
            write_failure(_note(), {**description(error, _STARTERS), "traceback": ""}, status)
            raise
    except BaseException as error:
        _fail(error)
    _leave_groups()


def _verified() -> AbstractContextManager[None]:
    """Whatever `colonnade verify` wants to see of the script, if that started it."""
    if "COLONNADE_VERIFY" not in os.environ:
        return nullcontext()
    from colonnade.proof.script_job import current_part, taking_part

    part = current_part()
    return taking_part(part) if part is not None else nullcontext()


def _run(kind: str, target: str) -> None:
    if kind == "module":
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(Path(target).resolve().parent)
    runpy.run_path(target, run_name="__main__")


def _leave_groups() -> None:
    """Destroy the process groups that a finished script left: gloo often aborts if the interpreter does it."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def _die_with_launcher() -> None:
    end_with_parent()
    if os.getppid() != int(os.environ[LAUNCHER]):
        os._exit(1)


def _obey_interrupts() -> None:
    """Let Ctrl-C end this rank within a second, though it waits inside torch, where Python hears no signal.

    Python itself notes every signal in a pipe; a thread reads there. Who handles SIGINT has all the time that the launcher gives.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def watch(_keep: Any = writer) -> None:
        while number := reader.recv(1):
            if number[0] == signal.SIGINT and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                time.sleep(_INTERRUPT_SECONDS)
                os._exit(128 + signal.SIGINT)

    threading.Thread(target=watch, name="colonnade-interrupts", daemon=True).start()


def _fail(error: BaseException) -> NoReturn:
    """Put the traceback into the note for the launcher and into the log, and exit as Python would have."""
    fields = description(error, _STARTERS)
    status = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    write_failure(_note(), fields, status)
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(2, HIDDEN_FROM_HERE + b"\n" + fields["traceback"].encode("utf-8", "backslashreplace"))
    if isinstance(error, KeyboardInterrupt):
        os._exit(status)  # to take torch's groups down would wait for ranks that are gone
    if fields["consequence"] == "wholly":
        time.sleep(
            FOLLOWS_AFTER
        )  # the launcher ends all ranks when one leaves: that which failed leaves its note first
    sys.exit(status)


def _note() -> Path:
    return Path(os.environ["TORCHELASTIC_ERROR_FILE"])


if __name__ == "__main__":
    main()

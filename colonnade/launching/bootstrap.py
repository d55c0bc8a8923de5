"""The first thing a rank of `colonnade run` executes: it dies with the launcher and records how it failed.

`python -m colonnade.launching.bootstrap KIND NAMES TARGET ARGUMENTS...`, which the launcher's agent starts once for each rank.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import signal
import socket
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from colonnade.constants import FOLLOWS_AFTER
from colonnade.launching.outcome import HIDDEN_FROM_HERE, description, end_with_parent, write_failure

LAUNCHER = "COLONNADE_LAUNCHER_PID"
_INTERRUPT_SECONDS = 0.7
_STARTERS = (__file__, runpy.__file__, "<frozen runpy>")


def main() -> None:
    """Run the script or module TARGET as `__main__`.

    KIND is "script" or "module"; NAMES is "plain", or "as-colossalai" to alias that package first.
    """
    kind, names, target, *arguments = sys.argv[1:]

    # A rank never outlives the launcher: the kernel ends it, or it ends here if the launcher has gone before that was asked.
    end_with_parent()
    if os.getppid() != int(os.environ[LAUNCHER]):
        os._exit(1)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    _end_soon_after_interrupt()

    sys.argv = [target, *arguments]
    note = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    try:
        if names == "as-colossalai":
            from colonnade.compat import install

            install()
        with ExitStack() as stack:
            # `colonnade verify` starts its ranks this way too, and records what the script does.
            if "COLONNADE_VERIFY" in os.environ:
                from colonnade.proof.script_job import current_part, taking_part

                part = current_part()
                if part is not None:
                    stack.enter_context(taking_part(part))
            if kind == "module":
                runpy.run_module(target, run_name="__main__", alter_sys=True)
            else:
                # As `python TARGET` does: the script's folder comes first in the path.
                if not getattr(sys.flags, "safe_path", False):
                    sys.path[0] = str(Path(target).resolve().parent)
                runpy.run_path(target, run_name="__main__")
    except SystemExit as error:
        if error.code not in (None, 0):
            status = error.code % 256 if isinstance(error.code, int) else 1
            write_failure(note, {**description(error, _STARTERS), "traceback": ""}, status)
            raise
    except BaseException as error:
        # The traceback goes into the note, which the launcher shows last, and into the log. Then exit as Python would have.
        fields = description(error, _STARTERS, fold_library=True)
        status = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        write_failure(note, fields, status)
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(2, HIDDEN_FROM_HERE + b"\n" + fields["traceback"].encode("utf-8", "backslashreplace"))
        if isinstance(error, KeyboardInterrupt):
            os._exit(status)  # to take torch's groups down would wait for ranks that are gone
        if fields["consequence"] == "wholly":
            # The launcher ends all ranks when one leaves: the rank that failed by itself leaves its note first.
            time.sleep(FOLLOWS_AFTER)
        sys.exit(status)

    # The process groups that a finished script left: gloo often aborts if the interpreter destroys them.
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def _end_soon_after_interrupt() -> None:
    """Let Ctrl-C end this rank within a second, though it waits inside torch, where Python handles no signal.

    Python itself notes every signal in a pipe; a thread reads there. A script that handles SIGINT has all the time that the launcher gives.
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


if __name__ == "__main__":
    main()

"""The entry point of a rank of `colonnade run`: runs the script, records a failure, and ends when the launcher ends.

The agent of the launcher starts `python -m colonnade.launching.bootstrap KIND NAMES TARGET ARGUMENTS...` once per rank.
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

    # A rank never outlives the launcher: the kernel kills it, or it exits here if the launcher has already gone.
    end_with_parent()
    if os.getppid() != int(os.environ[LAUNCHER]):
        os._exit(1)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)

    # Ctrl-C must end this rank within a second, even inside a torch wait, where Python does not run its signal handlers. Python
    # writes the number of every signal to this socket immediately, and a thread reads it. A script that handles SIGINT itself
    # has the full time that the launcher gives.
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def end_after_interrupt(_keep: Any = writer) -> None:
        while number := reader.recv(1):
            if number[0] == signal.SIGINT and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                time.sleep(_INTERRUPT_SECONDS)
                os._exit(128 + signal.SIGINT)

    threading.Thread(target=end_after_interrupt, name="colonnade-interrupts", daemon=True).start()

    sys.argv = [target, *arguments]
    note = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    try:
        if names == "as-colossalai":
            from colonnade.compat import install

            install()
        with ExitStack() as stack:
            # `colonnade verify` starts its ranks this way too, and records the training steps of the script.
            if "COLONNADE_VERIFY" in os.environ:
                from colonnade.proof.script_job import current_role, recorded_for_verify

                part = current_role()
                if part is not None:
                    stack.enter_context(recorded_for_verify(part))
            if kind == "module":
                runpy.run_module(target, run_name="__main__", alter_sys=True)
            else:
                # Like `python TARGET`, put the folder of the script first in the module path.
                if not getattr(sys.flags, "safe_path", False):
                    sys.path[0] = str(Path(target).resolve().parent)
                runpy.run_path(target, run_name="__main__")
    except SystemExit as error:
        if error.code not in (None, 0):
            status = error.code % 256 if isinstance(error.code, int) else 1
            write_failure(note, {**description(error, _STARTERS), "traceback": ""}, status)
            raise
    except BaseException as error:
        # The launcher prints the traceback last, from the note; the log has it too. Then exit with the status of Python.
        fields = description(error, _STARTERS, fold_library=True)
        status = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        write_failure(note, fields, status)
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(2, HIDDEN_FROM_HERE + b"\n" + fields["traceback"].encode("utf-8", "backslashreplace"))
        if isinstance(error, KeyboardInterrupt):
            os._exit(status)  # destroying process groups would wait for ranks that have exited
        if fields["consequence"] == "wholly":
            # The launcher stops all ranks when one exits. The rank that caused the failure must write its note first.
            time.sleep(FOLLOWS_AFTER)
        sys.exit(status)

    # A finished script may leave process groups behind; gloo often aborts if the interpreter destroys them at exit.
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()

"""A process that has torch and waits: each run of pytest is a copy of it, and so is the fork server of its worlds.

`python -m tests.mutants.server` in a copy of the tree reads lines of JSON, `output` and `arguments` of pytest and where to write
`coverage` ("" for none), and answers each with the id of the process and then its exit status. It never imports the package: the changed one is new in every copy.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Sequence
from multiprocessing import util
from pathlib import Path
from types import ModuleType

PRELOAD = (
    *("numpy", "torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.pipelining"),
    *("torch.distributed.tensor.parallel", "torch.distributed.fsdp", "torch.utils.data"),
)


def main() -> None:
    """Answer until nobody asks any more."""
    for name in PRELOAD:
        __import__(name)
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if not child:
            _run(**request)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _run(output: str, arguments: Sequence[str], coverage: str) -> None:
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), stream)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as long as the process
    sys.modules["__main__"] = ModuleType("__main__")  # or every rank would import this file
    sys.argv = ["pytest", *arguments]
    util.spawnv_passfds = _spawned  # type: ignore[assignment]
    if coverage:
        _measure(coverage)
    import pytest

    code = 1
    try:
        code = int(pytest.main([*arguments]))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _measure(data: str) -> None:
    """Write down the lines that this process and those it starts execute, one file each beside `data`."""
    from coverage import Coverage

    os.environ["COVERAGE_DATA"] = data
    os.environ["COVERAGE_PROCESS_START"] = settings = str(Path(__file__).with_name("coverage.ini"))
    Coverage(config_file=settings).start()


def _spawned(path: str, arguments: Sequence[str], passed: Sequence[int], spawn=util.spawnv_passfds) -> int:
    """Start a Python; the fork server as a copy of this process, which has imported most of what it wants."""
    command = arguments[-1]
    if "multiprocessing.forkserver" not in command:
        return spawn(path, arguments, passed)
    child = os.fork()
    if not child:
        code = 1
        try:
            # As a new process: what is open here, and says that this one lives, is closed there.
            for low, high in zip([2, *sorted(passed)], [*sorted(passed), 1 << 16], strict=True):
                os.closerange(low + 1, high)
            exec(command, {})
            code = 0
        finally:
            os._exit(code)
    return child


if __name__ == "__main__":
    main()

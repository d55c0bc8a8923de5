"""Processes of a script end: at their limit, with the wait, and with who waits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from colonnade.proof.scripts import running

SLEEPS = [
    sys.executable,
    "-c",
    "import faulthandler, signal, time\nfaulthandler.register(signal.SIGUSR1)\ntime.sleep(60)",
]


def is_gone(pid: int, seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


def test_the_limit_says_where_it_stood_and_nothing_is_left(tmp_path: Path) -> None:
    with running({tmp_path / "log": (SLEEPS, os.environ)}) as (one,):
        time.sleep(0.5)
        assert one.wait(time.monotonic()) is None
        assert "line 3 in <module>" in one.output()
    assert one.process.returncode is not None


def test_others_are_ended_when_the_wait_fails(tmp_path: Path) -> None:
    with pytest.raises(KeyError), running({tmp_path / str(at): (SLEEPS, os.environ) for at in range(2)}) as some:
        raise KeyError("the first failed")
    assert all(one.process.returncode is not None for one in some)


def test_one_whose_parent_was_killed_dies_too(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, sys, time\nfrom pathlib import Path\nfrom colonnade.proof.scripts import running\n"
        f"with running({{Path({str(tmp_path / 'log')!r}): ({SLEEPS!r}, os.environ)}}) as (one,):\n"
        "    print(one.process.pid, flush=True)\n    time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert is_gone(child)

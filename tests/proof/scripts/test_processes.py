"""Processes of a script, forked or new: they run it as `__main__`, and end at their limit, with the wait, and with who waits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from colonnade.proof.processes import Command, Processes, safe_imports, wait_for_all
from colonnade.proof.scripts import Script, verify_script

SCRIPTS = Path(__file__).parent / "of_users"


@pytest.fixture(params=["forked", "new"])
def processes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Processes]:
    (tmp_path / "of0.py").write_text("import numpy\n")  # before the fork, so that its generator exists there
    with Processes(str(tmp_path / "of0.py")) as some:
        if request.param == "new":
            some.restart_without_forks()
        assert some.forks == (request.param == "forked")
        yield some


def command(folder: Path, text: str, *arguments: str, name: str = "one", **environment: str) -> Command:
    script = folder / f"{name}.py"
    script.write_text(text)
    note = {"TORCHELASTIC_ERROR_FILE": str(folder / f"{name}.error")}
    return Command(
        ["script", "plain", str(script), *arguments], {**os.environ, **note, **environment}, folder / f"{name}.log"
    )


def is_gone(pid: int, seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


SHOWS = """
import atexit, json, os, random, signal, sys, numpy, torch
atexit.register(print, "at exit")
class Own: ...
print(json.dumps({
    "name": __name__, "argv": sys.argv[1:], "module": Own.__module__ in sys.modules, "path": sys.path[0],
    "given": os.environ.get("GIVEN"), "left": os.environ.get("OPENBLAS_NUM_THREADS"), "threads": torch.get_num_threads(),
    "session": os.getsid(0) != os.getsid(os.getppid()),
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler, "cwd": os.getcwd(),
    "drawn": [random.random(), torch.initial_seed(), *numpy.random.rand(1)],
}))
sys.exit(int(sys.argv[1]))
"""


def test_a_script_runs_as_main_with_its_own_arguments_environment_and_exit_code(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    one = {"GIVEN": "yes", "OMP_NUM_THREADS": "1"}
    some = [command(tmp_path, SHOWS, code, name=f"of{code}", **one) for code in ("0", "3")]
    with processes.running(some) as jobs:
        assert [job.wait(time.monotonic() + 60) for job in jobs] == [0, 3]
    found, last = jobs[0].output().splitlines()
    shown, other = json.loads(found), json.loads(jobs[1].output().splitlines()[0])
    assert not set(shown.pop("drawn")) & set(other["drawn"])  # nobody set a seed
    assert shown.pop("session") == processes.forks
    assert shown == {
        "name": "__main__", "argv": ["0"], "module": True, "path": str(tmp_path), "given": "yes", "left": None,
        "threads": 1, "interrupt": True, "cwd": str(tmp_path),
    }  # fmt: skip
    assert last == "at exit"


def test_the_limit_says_where_it_stood_and_nothing_is_left(processes: Processes, tmp_path: Path) -> None:
    with processes.running([command(tmp_path, "import time\nprint(1, flush=True)\ntime.sleep(60)\n")]) as (one,):
        while not one.output():
            time.sleep(0.05)
        assert wait_for_all([one], time.monotonic()) is None
        assert "line 3 in <module>" in one.output()
    assert is_gone(one.process.pid)


def test_the_first_failure_ends_the_wait_and_others_end_with_it(processes: Processes, tmp_path: Path) -> None:
    some = [
        command(tmp_path, "import time\ntime.sleep(60)\n", name="sleeps"),
        command(tmp_path, "raise KeyError('own')\n", name="fails"),
    ]
    with processes.running(some) as jobs:
        assert wait_for_all(jobs, time.monotonic() + 60) == [None, 1]
        assert "KeyError: 'own'" in jobs[1].output()
    assert all(is_gone(job.process.pid) for job in jobs)


@pytest.mark.parametrize("forked", [True, False])
def test_one_whose_parent_was_killed_dies_too(tmp_path: Path, forked: bool) -> None:
    sleeps = command(tmp_path, "import time\ntime.sleep(60)\n")
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, time\nfrom pathlib import Path\nfrom colonnade.proof.processes import Command, Processes\n"
        f"some = Processes('train.py')\n{'' if forked else 'some.close()'}\n"
        f"with some.running([Command({sleeps.words!r}, {dict(sleeps.environment)!r}, Path({str(sleeps.log)!r}))]) as (one,):\n"
        "    print(one.process.pid, flush=True)\n    time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert is_gone(child)


def test_only_imports_of_known_packages_are_made_before_the_fork(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, torch.nn as nn, mine\nfrom numpy import random\nfrom . import other\nimport torchmine\n"
    )
    import ast

    assert [ast.unparse(node) for node in safe_imports(str(script))] == [
        "import torch.nn as nn",
        "from numpy import random",
    ]
    assert safe_imports(str(tmp_path / "none.py")) == []


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_script_that_compiles_runs_in_new_processes(capsys: pytest.CaptureFixture[str]) -> None:
    with Processes("named.py") as some:
        report = verify_script(Script(str(SCRIPTS / "named.py"), ("compiled",)), some)
        assert report.ok, str(report)
        assert not some.forks

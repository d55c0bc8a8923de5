"""Real scripts on real ranks: what is shown, what is returned, and that nothing is left."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.cli import colonnade, command, environment

pytestmark = pytest.mark.slow

SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path

import torch
import torch.distributed as dist

what = sys.argv[1]
rank = int(os.environ["RANK"])


def grouped():
    dist.init_process_group("gloo")


def ring():
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    return total.item()


def env():
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    print(json.dumps({**{name: os.environ[name] for name in names}, "argv": sys.argv[1:], "path": sys.path[0]}))
    print("to stderr", file=sys.stderr)


def raise_on_1():
    grouped()
    print("ready")
    if rank == 1:
        inner = {}["missing"]
    ring()


def exit_on_1():
    grouped()
    if rank == 1:
        sys.exit(3)
    ring()


def kill_on_1():
    grouped()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ring()


def abort():
    grouped()
    dist.all_reduce(torch.ones(100_000 if rank == 0 else 10))


def all_sum():
    grouped()
    print(json.dumps({"sum": ring(), "port": os.environ["MASTER_PORT"]}))


def interrupted():
    (Path(sys.argv[2]) / f"{rank}.pid").write_text(str(os.getpid()))
    Path(os.environ["COLONNADE_SAVED"]).write_text("step 150 in run/step-00000150")
    grouped()
    dist.barrier() if rank == 0 else time.sleep(600)  # rank 0 waits inside torch, where Python hears no signal


def sleep():
    if "stubborn" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "orderly" in sys.argv:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    folder = Path(sys.argv[2])
    (folder / f".{rank}").write_text(str(os.getpid()))
    (folder / f".{rank}").rename(folder / f"{rank}.pid")
    time.sleep(600)


def fail_once():
    grouped()
    ring()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL) if "kill" in sys.argv else exec("raise ValueError('first try')")
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        time.sleep(60)
    print(json.dumps({"sum": ring(), "try": os.environ["TORCHELASTIC_RESTART_COUNT"]}))


def fail_often():
    grouped()
    total, count = ring(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if count < int(sys.argv[2]):
        if rank == count % 2:
            os.kill(os.getpid(), signal.SIGKILL)
        ring()
    print(json.dumps({"sum": total, "try": count}))


globals()[what]()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    return file


def running(pids: list[int]) -> list[int]:
    """Return those of the processes that still run; a zombie does not."""

    def runs(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            return False

    return [pid for pid in pids if runs(pid)]


def gone_within(seconds: float, pids: list[int]) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end and running(pids):
        time.sleep(0.05)
    return not running(pids)


def started(
    script: Path, ranks: int, *words: object, options: tuple[object, ...] = (), what: str = "sleep"
) -> tuple[subprocess.Popen[str], list[int]]:
    """Start the sleeping job and return its launcher and its ranks' pids."""
    temporary = script.parent / "tmp"
    temporary.mkdir()
    launcher = subprocess.Popen(
        command("run", "--nproc", ranks, *options, script, what, script.parent, *words),
        env={**environment(), "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 60
    while len(files := list(script.parent.glob("*.pid"))) < ranks:
        assert time.monotonic() < end
        assert launcher.poll() is None, launcher.communicate()
        time.sleep(0.05)
    return launcher, [int(file.read_text()) for file in files]


def test_rank_0_is_plain_the_others_are_marked_and_arguments_arrive(script: Path) -> None:
    done = colonnade("run", "--nproc", 3, script, "env", "--lr", "1", "--nproc", "7")
    assert done.returncode == 0
    plain = [line for line in done.stdout.splitlines() if not line.startswith("[")]
    marked = dict(re.findall(r"^\[rank (\d)\] (.*)$", done.stdout, re.MULTILINE))
    seen = [json.loads(text) for text in (*plain, marked["1"], marked["2"])]
    assert len(plain) == 1
    assert [info["RANK"] for info in seen] == ["0", "1", "2"]
    for info in seen:
        assert info["argv"] == ["env", "--lr", "1", "--nproc", "7"]
        assert info["WORLD_SIZE"] == "3"
        assert info["MASTER_ADDR"] == "127.0.0.1"
        assert info["path"] == str(script.parent)
        assert info["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 3))
    assert sorted(done.stderr.splitlines()) == ["[rank 1] to stderr", "[rank 2] to stderr", "to stderr"]


def test_the_first_failing_ranks_traceback_is_last_and_alone(script: Path, tmp_path: Path) -> None:
    done = colonnade("run", "--nproc", 3, "--log-dir", tmp_path / "logs", script, "raise_on_1")
    assert done.returncode == 1
    assert done.stderr.count("Traceback (most recent call last)") == 1
    tail = done.stderr[done.stderr.index("colonnade: rank 1 failed first, exit status 1") :].splitlines()
    assert tail[1] == "Traceback (most recent call last):"
    assert tail[2].startswith(f'  File "{script}"')
    assert tail[-1] == "KeyError: 'missing'"
    assert "ranks 0, 2: ended because rank 1 was gone" in done.stderr
    assert "runpy" not in done.stderr
    assert (tmp_path / "logs" / "rank1.stdout").read_text() == "ready\n"
    assert "KeyError: 'missing'" in (tmp_path / "logs" / "rank1.stderr").read_text()


@pytest.mark.parametrize(
    ("what", "status", "why"),
    [
        ("exit_on_1", 3, "SystemExit: 3"),
        pytest.param("kill_on_1", 137, "killed by SIGKILL", marks=pytest.mark.long),
        pytest.param("abort", 134, "killed by SIGABRT", marks=pytest.mark.long),
    ],
)
def test_exit_codes_are_those_of_the_rank_that_failed_first(script: Path, what: str, status: int, why: str) -> None:
    done = colonnade("run", "--nproc", 2, script, what)
    assert done.returncode == status, done.stderr
    assert f"colonnade: rank 1 failed first, exit status {status}: {why}" in done.stderr


@pytest.mark.parametrize(
    ("number", "status"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.long), (signal.SIGTERM, 143)]
)
def test_a_signal_to_the_launcher_ends_every_rank(script: Path, number: signal.Signals, status: int) -> None:
    launcher, pids = started(script, 3)
    assert running(pids) == pids
    launcher.send_signal(number)
    _, stderr = launcher.communicate(timeout=30)
    assert launcher.returncode == status
    assert stderr.splitlines()[-1] == f"colonnade: ended by {number.name}"
    assert "Traceback" not in stderr
    assert not running(pids)


def test_ctrl_c_ends_ranks_that_wait_inside_torch_and_says_what_was_saved(script: Path) -> None:
    launcher, pids = started(script, 2, what="interrupted")
    time.sleep(2)
    launcher.send_signal(signal.SIGINT)
    assert gone_within(2, pids)
    _, stderr = launcher.communicate(timeout=30)
    assert launcher.returncode == 130
    assert stderr.splitlines()[-2].startswith("saved last: step 150 in run/step-00000150")
    assert stderr.splitlines()[-1] == "colonnade: ended by SIGINT"
    assert "Traceback" not in stderr


def test_ranks_that_stop_in_order_give_the_launcher_their_status(script: Path) -> None:
    launcher, pids = started(script, 2, "orderly")
    launcher.terminate()
    _, stderr = launcher.communicate(timeout=60)
    assert launcher.returncode == 75, stderr
    assert stderr.splitlines()[-1].startswith("colonnade: stopped by SIGTERM")
    assert not running(pids)


def test_a_rank_that_ignores_the_signal_is_killed_after_the_grace(script: Path) -> None:
    launcher, pids = started(script, 2, "stubborn", options=("--grace", 1))
    launcher.terminate()
    launcher.communicate(timeout=60)
    assert not running(pids)


def test_a_killed_launcher_leaves_no_rank(script: Path) -> None:
    launcher, pids = started(script, 3)
    launcher.kill()
    launcher.wait()
    assert gone_within(3, pids)


@pytest.mark.long
def test_two_runs_at_once_do_not_meet(script: Path) -> None:
    jobs = [
        subprocess.Popen(
            command("run", "-n", 2, script, "all_sum"), env=environment(), stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    outputs = [job.communicate(timeout=100)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0]
    answers = [json.loads(output.splitlines()[0].removeprefix("[rank 1] ")) for output in outputs]
    assert [answer["sum"] for answer in answers] == [3.0, 3.0]
    assert answers[0]["port"] != answers[1]["port"]


@pytest.mark.long
@pytest.mark.parametrize("how", ["kill", "raise"])
def test_a_restart_comes_up_and_is_announced(script: Path, tmp_path: Path, how: str) -> None:
    done = colonnade("run", "--nproc", 2, "--max-restarts", 1, "--log-dir", tmp_path / "logs", script, "fail_once", how)
    assert done.returncode == 0, done.stderr
    assert '{"sum": 3.0, "try": "1"}' in done.stdout.splitlines()
    wanted = "a rank died" if how == "kill" else "rank 1: ValueError: first try"
    assert f"colonnade: {wanted}; restart 1" in done.stderr.splitlines()
    assert (tmp_path / "logs" / "restart1" / "rank1.stdout").read_text() == '{"sum": 3.0, "try": "1"}\n'


@pytest.mark.parametrize("placed", [True, pytest.param(False, marks=pytest.mark.long)])
def test_two_machines_make_one_world(script: Path, placed: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
    nodes = [
        subprocess.Popen(
            command(
                *("run", "--nproc", 1, "--nnodes", 2, "--rdzv-endpoint", endpoint),
                *(("--node-rank", node) if placed else ()),
                *(script, "all_sum"),
            ),
            env={**environment(), "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    outputs = [node.communicate(timeout=100)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0]
    assert all('"sum": 3.0' in output for output in outputs)
    if placed:
        assert [output.startswith("[rank 1]") for output in outputs] == [False, True]


def test_temporary_logs_are_removed(script: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tmp"
    folder.mkdir()
    done = subprocess.run(
        command("run", script, "env"), env={**environment(), "TMPDIR": str(folder)}, capture_output=True, check=True
    )
    assert done.stdout
    assert not list(folder.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("times", [2, pytest.param(30, marks=[pytest.mark.long, pytest.mark.timeout(400)])])
def test_restarts_in_a_row_all_come_up(script: Path, times: int) -> None:
    done = colonnade("run", "--nproc", 2, "--max-restarts", times, script, "fail_often", times, timeout=60 + 10 * times)
    assert done.returncode == 0, done.stderr
    assert f'{{"sum": 3.0, "try": {times}}}' in done.stdout.splitlines()
    assert sum("restart " in line for line in done.stderr.splitlines()) == times

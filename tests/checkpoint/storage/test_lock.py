"""One run writes to a folder at a time; the second is told who does, and a dead one's lock is taken over."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch import nn

from colonnade.checkpoint import CheckpointManager
from colonnade.checkpoint.storage import LOCK_FILE, RunLock
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import CheckpointError
from colonnade.testing import run_world
from tests.checkpoint.models import WAYS, launched

HOLD = (
    "import sys, time, os\n"
    "from pathlib import Path\n"
    "from colonnade.checkpoint.storage import RunLock\n"
    "lock = RunLock(Path(sys.argv[1]))\n"
    "forks = 'fork' in sys.argv\n"
    "if not forks or os.fork() == 0:\n"
    "    print('ready', flush=True)\n"
    "time.sleep(60)\n"
)


@pytest.fixture
def holder(tmp_path, request):
    """Another process that holds the lock of the folder."""
    words = [sys.executable, "-c", HOLD, str(tmp_path), *getattr(request, "param", [])]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


def test_the_second_run_is_told_who_holds_the_folder(tmp_path, holder):
    asked = time.monotonic()
    with pytest.raises(CheckpointError, match=f"process {holder.pid} on {socket.gethostname()}, since 20"):
        CheckpointManager(tmp_path, ParallelContext())
    assert time.monotonic() - asked < 10  # and does not wait for it
    CheckpointManager(tmp_path, ParallelContext(), read_only=True).close()


@pytest.mark.parametrize("holder", [[], ["fork"]], indirect=True, ids=["alone", "with a child that lives on"])
def test_the_lock_of_a_killed_run_is_taken_over(tmp_path, holder, caplog):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with caplog.at_level("INFO"):
        lock = RunLock(tmp_path)
    assert f"took over {tmp_path / LOCK_FILE} from process {holder.pid}" in caplog.text
    assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    lock.release()


def test_two_managers_of_one_process_do_not_share_a_folder(tmp_path):
    first = CheckpointManager(tmp_path, ParallelContext())
    with pytest.raises(CheckpointError, match="this process already has a CheckpointManager"):
        CheckpointManager(tmp_path, ParallelContext())
    first.close()
    CheckpointManager(tmp_path, ParallelContext()).close()
    assert (tmp_path / LOCK_FILE).read_text() == ""


def test_a_forgotten_manager_gives_the_folder_back(tmp_path):
    CheckpointManager(tmp_path, ParallelContext())
    CheckpointManager(tmp_path, ParallelContext()).close()


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").write_text("precious")
    (tmp_path / LOCK_FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="opening"):
        CheckpointManager(tmp_path, ParallelContext())
    assert (tmp_path / "elsewhere").read_text() == "precious"


def _flock_fails(monkeypatch, code: int) -> None:
    def fail(descriptor: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", fail)


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_a_file_system_without_locks_is_warned_of_and_saved_to(tmp_path, monkeypatch, caplog, code):
    _flock_fails(monkeypatch, code)
    with CheckpointManager(tmp_path, ParallelContext()) as manager:
        manager.save(1, nn.Linear(1, 1))
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    assert manager.steps() == [1]
    assert f"does not support locks ({os.strerror(code)})" in caplog.text
    assert "Make sure that no other run writes to this folder" in caplog.text
    assert "last owner in the file" not in caplog.text
    (tmp_path / LOCK_FILE).write_text('{"pid": 5}')
    RunLock(tmp_path).release()
    assert "folder (last owner in the file: process 5 on ?, since ?)" in caplog.text
    assert "took over" not in caplog.text


def test_a_lock_that_fails_otherwise_is_not_taken_for_another_run(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        _flock_fails(patched, errno.EIO)
        with pytest.raises(CheckpointError, match=f"cannot be locked: {os.strerror(errno.EIO)}") as caught:
            CheckpointManager(tmp_path, ParallelContext())
        assert "another run" not in str(caught.value)
    CheckpointManager(tmp_path, ParallelContext()).close()


def open_a_held_folder(folder: Path) -> str:
    with launched(WAYS["data 2"]) as context:
        try:
            CheckpointManager(folder, context)
        except CheckpointError as error:
            return str(error)
        return ""


def test_every_rank_of_the_second_run_is_refused(tmp_path, holder):
    for message in run_world(2, open_a_held_folder, tmp_path).values:
        assert f"process {holder.pid} on" in message


@pytest.mark.parametrize("text", ["", "{", "[1]"])
def test_a_holder_that_has_not_said_its_name_is_one_too(tmp_path, text):
    lock = RunLock(tmp_path)
    (tmp_path / LOCK_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=r"another run writes checkpoints to .*: an unknown process"):
        RunLock(tmp_path)
    lock.release()


def test_who_is_refused_keeps_nothing_open(tmp_path, opened):
    lock = RunLock(tmp_path)
    before = opened()
    with pytest.raises(CheckpointError) as refused:
        RunLock(tmp_path)
    assert opened() == before, refused
    assert not (tmp_path / LOCK_FILE).stat().st_mode & 0o111
    lock.release()


def test_the_file_says_who_holds_it_and_nothing_of_who_did(tmp_path):
    (tmp_path / LOCK_FILE).write_text("x" * 500)
    lock = RunLock(tmp_path)
    told = json.loads((tmp_path / LOCK_FILE).read_text())
    assert (told["pid"], told["host"]) == (os.getpid(), socket.gethostname())
    lock.release()
    assert (tmp_path / LOCK_FILE).read_text() == ""
    lock.release()
    RunLock(tmp_path).release()

"""Leaving: a process that ends keeps its exit status, whatever torch's threads are still at."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from colonnade.comm.torch_versions import HashStore, PrefixStore
from colonnade.context import rendezvous
from colonnade.errors import LaunchError

ROOT = Path(__file__).parents[2]
SCRIPT = """
import torch
import torch.distributed as dist
import colonnade

colonnade.launch({}, verbose=False)
here = torch.ones(1_000_000)
for _ in range(100):  # nobody waits for these, so gloo's threads are the last to hold what they fill
    dist.all_gather([torch.empty_like(here)], here, async_op=True)
raise SystemExit(75)
"""


@pytest.mark.slow
def test_no_thread_of_gloo_that_is_late_costs_the_exit_status(monkeypatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "OFF")
    command = [sys.executable, "-c", SCRIPT]
    # Without the wait two of three abort.
    started = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(3)]
    ended = [(process.communicate(timeout=100)[1], process.returncode) for process in started]
    assert [code for _, code in ended] == [75] * 3, ended


@pytest.mark.parametrize(
    ("stat", "busy"),
    [
        ("12 (pt_gloo_runloop) R 1 2", True),
        ("12 (pt_gloo_runloop) D 1 2", True),
        ("12 (pt_gloo_runloop) S 1 2", False),
        ("12 (pt_x) (y) S 1 2", False),
        ("12 (python) R 1 2", False),  # not torch's: nobody knows when it ends
        ("", False),
        (None, False),
    ],
)
def test_which_threads_are_waited_for_at_the_end(tmp_path, stat, busy):
    if stat is not None:
        (tmp_path / "stat").write_text(stat)
    assert rendezvous._is_busy(tmp_path) is busy


def test_the_wait_at_the_end_ends_when_threads_are_quiet_and_after_three_seconds_at_most(monkeypatch):
    begin = time.monotonic()
    rendezvous._wait_for_threads()
    assert time.monotonic() - begin < 2.5
    seen = iter([True, True, False, True])
    monkeypatch.setattr(rendezvous, "_is_busy", lambda task: next(seen, False))
    rendezvous._wait_for_threads()
    assert next(seen, None) is None  # quiet once is not enough
    monkeypatch.setattr(rendezvous, "_is_busy", lambda task: True)
    monkeypatch.setattr(rendezvous, "_QUIET_SECONDS", 0.05)
    begin = time.monotonic()
    rendezvous._wait_for_threads()
    assert 0.05 <= time.monotonic() - begin < 2.5


def test_one_busy_thread_of_several_is_waited_for(monkeypatch):
    done = threading.Event()
    threading.Thread(target=done.wait).start()
    try:
        monkeypatch.setattr(rendezvous, "_is_busy", lambda task: task.name == str(os.getpid()))
        monkeypatch.setattr(rendezvous, "_QUIET_SECONDS", 0.2)
        begin = time.monotonic()
        rendezvous._wait_for_threads()
        assert time.monotonic() - begin >= 0.2
    finally:
        done.set()


def test_before_python_ends_threads_are_seen_at_rest_many_times_in_a_row(monkeypatch):
    almost = [False] * (rendezvous._QUIET_LOOKS - 1)
    states = iter([True, *almost, True, *almost, False])
    monkeypatch.setattr(rendezvous, "Path", lambda path: SimpleNamespace(glob=lambda pattern: [path]))
    monkeypatch.setattr(rendezvous, "_is_busy", lambda task: next(states))
    rendezvous._wait_for_threads()
    assert list(states) == []
    monkeypatch.setattr(rendezvous, "_is_busy", lambda task: True)
    monkeypatch.setattr(rendezvous, "_QUIET_SECONDS", 0.01)
    rendezvous._wait_for_threads()  # not for ever


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_takes_a_launch_that_failed_back(monkeypatch, rank):
    store = HashStore()
    store.set(rendezvous._launch_key(), "7")
    monkeypatch.setattr(rendezvous, "_store", lambda *args: PrefixStore("launch", store))

    def fails(*args: object) -> None:
        raise RuntimeError("nobody came")

    monkeypatch.setattr(rendezvous, "_meet", fails)
    with pytest.raises(LaunchError, match=f"rank {rank} of 2 could not join the world at .*: nobody came"):
        rendezvous.join_world(rank, 2, None, "localhost", 1, 1.0)
    assert store.get(rendezvous._launch_key()) == (b"" if rank == 0 else b"7")

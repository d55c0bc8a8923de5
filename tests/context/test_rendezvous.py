"""Leaving: a process that ends keeps its exit status, whatever torch's threads are still at."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from colonnade.comm.torch_versions import HashStore, PrefixStore
from colonnade.context import rendezvous
from colonnade.errors import ConfigError, LaunchError

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


@pytest.mark.parametrize(("timeout", "seconds"), [(None, 10.0), (3.0, 3.0), (100.0, 10.0)])
def test_a_rank_that_fails_before_it_joins_tells_the_store(monkeypatch, timeout, seconds):
    store, asked = HashStore(), []

    def opened(*args: object) -> HashStore:
        asked.append(args)
        return store

    monkeypatch.setattr(rendezvous, "_store", opened)
    with (
        pytest.raises(ConfigError, match="no such key"),
        rendezvous.telling_the_others(1, 2, "here", 7, timeout),
    ):
        raise ConfigError("no such key")
    assert asked == [(1, 2, "here", 7, timedelta(seconds=seconds))]
    told = rendezvous._meet(store, 0, 1 << 20, timedelta(seconds=1))
    assert isinstance(told, ConfigError)
    assert "rank 1" in str(told)
    assert "no such key" in str(told)
    assert store.add("colonnade/told", 0) == 2  # who told, and who was told


@pytest.mark.parametrize("world_size", [1, 2])
def test_nobody_is_told_where_nothing_failed_or_nobody_else_is(monkeypatch, world_size):
    monkeypatch.setattr(rendezvous, "_store", lambda *args: pytest.fail("it was opened"))
    with rendezvous.telling_the_others(0, world_size, None, None, None):
        pass
    with pytest.raises(KeyError), rendezvous.telling_the_others(0, 1, None, None, None):
        raise KeyError


def test_ranks_meet_where_the_last_one_opens_the_door():
    store = HashStore()
    assert rendezvous._meet(None, 0, 1, timedelta(0)) is None
    with pytest.raises(TimeoutError, match=r"^1 of 2 ranks came within 0 s$"):
        rendezvous._meet(store, 0, 2, timedelta(milliseconds=20))
    assert rendezvous._meet(store, 1, 2, timedelta(seconds=1)) is None
    assert store.get("colonnade/verdict") == b""
    rendezvous._decide(store, "too late")  # who is first decides
    assert store.get("colonnade/verdict") == b""


@pytest.mark.parametrize(("rank", "others", "waits"), [(0, 0, True), (0, 1, False), (1, 0, False)])
def test_rank_0_leaves_the_store_last(monkeypatch, rank, others, waits):
    monkeypatch.setattr(rendezvous, "_LEAVE_SECONDS", 0.1)
    store = HashStore()
    store.add("colonnade/left", others)
    begin = time.monotonic()
    rendezvous._leave_store(store, rank, 2, "left")
    assert (time.monotonic() - begin >= 0.1) is waits
    assert store.add("colonnade/left", 0) == others + 1

"""Leaving: a process that ends keeps its exit status, whatever torch's threads are still at."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from colonnade._launch import launch
from colonnade.comm.torch_versions import HashStore
from colonnade.context import rendezvous
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import ConfigError, LaunchError
from colonnade.testing import run_world
from tests.hosts.counting import Counted

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
        ("12 (pt_x) (y) R 1 2", True),
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
    monkeypatch.setattr(rendezvous, "_IDLE_SECONDS", 0.05)
    begin = time.monotonic()
    rendezvous._wait_for_threads()
    assert 0.05 <= time.monotonic() - begin < 2.5


def test_a_world_of_one_that_cannot_be_joined_says_why(monkeypatch):
    at_exit: list[object] = []

    def forget(one: object) -> None:
        if one in at_exit:
            at_exit.remove(one)

    monkeypatch.setattr(rendezvous, "atexit", SimpleNamespace(register=at_exit.append, unregister=forget))
    for _ in range(2):
        with pytest.raises(LaunchError, match=r"rank 0 of 1 could not join the world .* with backend 'cpu:nowhere'"):
            rendezvous.join_world(0, 1, "cpu:nowhere", None, None, 1.0)
    assert at_exit == [rendezvous._wait_for_threads]  # once, however often it was tried


class Leaving(HashStore):
    """A store that is going away while it is asked, so often; then rank 0 answers."""

    def __init__(self, times: float) -> None:
        super().__init__()
        self.times = times

    def add(self, key: str, number: int) -> int:
        self.times -= 1
        if self.times >= 0:
            raise dist.DistNetworkError("connection reset")
        return super().add(key, number)

    def set(self, key: str, value: str) -> None:
        super().set(key, value)
        if key.startswith("colonnade/launch/arrival/"):
            super().set(f"colonnade/launch/answer/{value.partition(' ')[0]}", "colonnade/new")


def test_a_rank_comes_back_to_a_store_that_went_away(monkeypatch):
    left = Leaving(2)
    monkeypatch.setattr(rendezvous, "_last_prefix", "colonnade/old")
    monkeypatch.setattr(rendezvous, "_connect", lambda *args: left)
    monkeypatch.setattr(rendezvous, "PrefixStore", lambda prefix, base: prefix)
    assert rendezvous._store(1, 2, "here", 7, timedelta(seconds=5)) == "colonnade/new"
    assert rendezvous._last_prefix == "colonnade/new"
    left.times, begin = float("inf"), time.monotonic()
    with pytest.raises(LaunchError, match="rank 1 could not reach rank 0 at here:7: "):
        rendezvous._store(1, 2, "here", 7, timedelta(seconds=0.2))
    assert time.monotonic() - begin >= 0.2

    def refused(*args: object) -> None:
        left.times += 1
        raise RuntimeError("refused")

    for rank in (0, 1):
        left.times = 0
        monkeypatch.setattr(rendezvous, "_connect", refused)
        with pytest.raises(LaunchError, match=f"rank {rank} could not reach rank 0 at here:7: refused"):
            rendezvous._store(rank, 2, "here", 7, timedelta(seconds=5))
        assert left.times == 1  # not tried again


def test_a_rank_takes_only_an_answer_to_its_own_token(monkeypatch):
    base = HashStore()
    monkeypatch.setattr(rendezvous, "_last_prefix", "")
    first = rendezvous._prefix(base, 0, 0.0)
    assert rendezvous._prefix(base, 0, 0.0) != first  # for every launch another
    base.add(rendezvous._ARRIVALS, 1)  # a rank of an earlier start, killed before it left its token
    for _ in range(2):  # ranks that nobody answered
        with pytest.raises(TimeoutError, match="rank 0 did not launch again"):
            rendezvous._prefix(base, 1, time.monotonic() + 0.05)
    old = rendezvous._Answers(base, "old")
    old.answer_arrivals()
    with pytest.raises(TimeoutError, match="rank 0 did not launch again"):  # a new token, and the old answers
        rendezvous._prefix(base, 1, time.monotonic() + 0.05)
    came: list[str] = []
    waiting = threading.Thread(target=lambda: came.append(rendezvous._prefix(base, 1, time.monotonic() + 20)))
    waiting.start()
    new = rendezvous._Answers(base, "new")
    while not came and waiting.is_alive():
        new.answer_arrivals()
    waiting.join()
    assert came == ["new"]
    assert rendezvous._last_prefix == "new"


def test_rank_0_looks_at_each_rank_that_has_come_once_and_leaves_those_it_has_refused_to_the_next_launch():
    base = HashStore()

    def come(token: str, last: str = "") -> None:
        base.set(rendezvous._ARRIVAL.format(base.add(rendezvous._ARRIVALS, 1)), f"{token} {last}")

    def answer(token: str) -> str:
        key = rendezvous._ANSWER.format(token)
        return base.get(key).decode() if base.check([key]) else "none"

    come("a")
    late = base.add(rendezvous._ARRIVALS, 1)
    one = rendezvous._Answers(base, "one")
    one.answer_arrivals()
    assert answer("a") == "one"
    base.delete_key(rendezvous._ANSWER.format("a"))
    base.set(rendezvous._ARRIVAL.format(late), "b ")
    come("c", last="one")  # was told that the launch `one` fails
    one.answer_arrivals()
    assert [answer(token) for token in "abc"] == ["none", "one", "none"]
    two = rendezvous._Answers(base, "two")
    two.answer_arrivals()
    assert answer("c") == "two"
    two.close()
    base.delete_key(rendezvous._ANSWER.format("c"))
    rendezvous._Answers(base, "three").answer_arrivals()
    assert answer("c") == "none"  # where a launch has come up, what was before it is over


def _launched_with(port: int, count: str, ends: bool) -> tuple[float, str]:
    """Join by a store of the launcher's, as under torchrun, with a count of restarts of this rank's own."""
    rank = int(os.environ["RANK"])
    os.environ |= {"TORCHELASTIC_RESTART_COUNT": count[rank], "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ["MASTER_PORT"] = str(port)
    context = launch({}, context=ParallelContext(), verbose=False, timeout=20)
    value = torch.tensor([rank + 1.0])
    dist.all_reduce(value)
    if ends:
        os.kill(os.getpid(), signal.SIGKILL)
    context.destroy()
    return value.item(), rendezvous._last_prefix


def test_ranks_with_unequal_counts_of_restarts_meet_in_a_store_that_outlives_them():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run_world(3, _launched_with, store.port, "000", True, backend=None, check=False)  # all are killed
    alone = {"RANK": "1", "WORLD_SIZE": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    run_world(1, _waits_in_vain, store.port, backend=None, env=alone)
    prefixes = set()
    for count in ("001", "120"):
        results = run_world(3, _launched_with, store.port, count, False, backend=None, timeout=30).values
        assert [total for total, _ in results] == [6.0] * 3
        assert len({prefix for _, prefix in results}) == 1
        prefixes.add(results[0][1])
    assert len(prefixes) == 2


def _waits_in_vain(port: int) -> None:
    """A rank that comes, and is answered by nobody."""
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    with pytest.raises(LaunchError, match="rank 0 did not launch again"):
        launch({}, 1, 3, "127.0.0.1", port, context=ParallelContext(), verbose=False, timeout=0.5)


def test_without_cuda_ranks_compute_on_the_cpu_and_talk_by_gloo(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert (rendezvous.default_backend(), rendezvous.device_for(3).type) == ("gloo", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert rendezvous.default_backend() == "nccl"
    assert [rendezvous.device_for(3), rendezvous.device_for(3, 0)] == [torch.device("cuda", 1), torch.device("cuda", 0)]


@pytest.mark.parametrize(("timeout", "seconds"), [(None, 10.0), (3.0, 3.0), (100.0, 10.0)])
def test_a_rank_that_fails_before_it_joins_tells_the_store(monkeypatch, timeout, seconds):
    store, asked = HashStore(), []
    monkeypatch.setattr(rendezvous, "_LEAVE_SECONDS", 0.01)

    def opened(*args: object) -> HashStore:
        asked.append(args)
        return store

    monkeypatch.setattr(rendezvous, "_store", opened)
    with pytest.raises(ConfigError, match="no such key"), rendezvous.share_start_up_errors(1, 2, "here", 7, timeout):
        raise ConfigError("no such key")
    assert asked == [(1, 2, "here", 7, timedelta(seconds=seconds))]
    told = rendezvous._meet(store, 0, 1 << 20, timedelta(seconds=1))
    assert isinstance(told, ConfigError)
    assert "rank 1" in str(told)
    assert "no such key" in str(told)
    assert store.add("colonnade/refused", 0) == 2  # who told, and who was told


@pytest.mark.parametrize("world_size", [1, 2])
def test_nobody_is_told_where_nothing_failed_or_nobody_else_is(monkeypatch, world_size):
    monkeypatch.setattr(rendezvous, "_store", lambda *args: pytest.fail("it was opened"))
    with rendezvous.share_start_up_errors(0, world_size, None, None, None):
        pass
    with pytest.raises(KeyError), rendezvous.share_start_up_errors(0, 1, None, None, None):
        raise KeyError


def test_ranks_meet_where_the_last_one_opens_the_door():
    store = HashStore()
    assert rendezvous._meet(None, 0, 1, timedelta(0)) is None
    with pytest.raises(TimeoutError, match=r"^1 of 2 ranks connected within 0 s$"):
        rendezvous._meet(store, 0, 2, timedelta(milliseconds=20))
    assert rendezvous._meet(store, 1, 2, timedelta(seconds=1)) is None
    assert store.get("colonnade/outcome") == b""
    rendezvous._set_outcome(store, "too late")  # who is first decides
    assert store.get("colonnade/outcome") == b""


@pytest.mark.parametrize(("rank", "others", "waits"), [(0, 0, True), (0, 1, False), (1, 0, False)])
def test_rank_0_leaves_the_store_last(monkeypatch, rank, others, waits):
    monkeypatch.setattr(rendezvous, "_LEAVE_SECONDS", 0.1)
    store = HashStore()
    store.add("colonnade/left", others)
    begin = time.monotonic()
    rendezvous._leave_store(store, rank, 2, "left")
    assert (time.monotonic() - begin >= 0.1) is waits
    assert store.add("colonnade/left", 0) == others + 1


def _keys_of_a_launch(config: dict[str, Any], port: int) -> int:
    stores, connect = [], rendezvous._connect
    rendezvous._connect = lambda *args: stores.append(Counted(connect(*args))) or stores[-1]  # type: ignore[assignment]
    os.environ["MASTER_PORT"] = str(port)
    with launch(config, context=ParallelContext(), verbose=False):
        dist.barrier()
        return stores[0].keys


@pytest.mark.slow
def test_a_launch_asks_the_store_for_as_many_keys_as_there_are_ranks():
    counts = {}
    for ranks in (2, 4, 8, 16):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        debug = {"TORCH_DISTRIBUTED_DEBUG": "OFF"}
        counts[ranks] = sum(
            run_world(ranks, _keys_of_a_launch, {"parallel": {"tensor": 2}}, port, backend=None, env=debug).values
        )
    print(counts)
    assert all(count <= 40 * ranks for ranks, count in counts.items()), counts

"""A rank that is stopped, dead or cut off is called that, with its host, and never "going on"; the error that ends a wait names it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import colonnade
from colonnade.comm import peer_errors, waits
from colonnade.comm.peer_errors import PeerProcesses, ProcessNote
from colonnade.comm.torch_versions import HashStore, default_store
from colonnade.comm.waits import WaitWatch
from colonnade.testing import WorldError, run_world


@pytest.fixture
def store(monkeypatch):
    made = HashStore()
    monkeypatch.setattr(waits, "default_store", lambda: made)
    monkeypatch.setattr(waits, "PUBLISH_AFTER", 0.1)
    monkeypatch.setattr(peer_errors, "BEAT_SECONDS", 0.1)
    return made


def told(store: Any, rank: int, note: Any, beaten: float) -> None:
    """What a rank of another process has told: its host and process, and when it was heard last."""
    store.set(f"colonnade/process/{rank}", json.dumps(note))
    store.set(f"colonnade/beat/{rank}", f"{time.time() - beaten:.3f}")
    store.set(f"colonnade/waits/{rank}", "")


class Other:
    """A process of this host, as a note tells of it."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        pid = self.process.pid
        self.note = ProcessNote(ProcessNote.of_this_process().machine, pid, peer_errors._start_time(pid), "here")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def other():
    made = Other()
    yield made
    made.end()


def test_a_stopped_a_dead_and_a_silent_process_of_this_host_are_told_apart(store, other):
    watched = PeerProcesses(0, 3, store)
    told(store, 1, other.note, 0.0)
    told(store, 2, [other.note[0], 2**22 + 5, 1, "here"], 0.0)
    assert watched.not_running(store) == {2: "dead: its process has ended"}
    os.kill(other.process.pid, signal.SIGSTOP)
    until = time.monotonic() + 5
    while other.note.why_not_running() is None and time.monotonic() < until:
        time.sleep(0.01)
    assert watched.not_running(store)[1].startswith("stopped (by SIGSTOP")
    os.kill(other.process.pid, signal.SIGCONT)
    told(store, 1, other.note, 60.0)  # it runs, and says nothing
    assert watched.not_running(store)[1].startswith("silent for 6")
    assert "its process exists, but its Python does not run" in watched.not_running(store)[1]
    assert watched.host(1, store) == ""  # one host needs no name


def test_silent_ranks_of_other_hosts_are_dead_or_cut_off_and_named_with_the_host(store):
    watched = PeerProcesses(0, 5, store)
    told(store, 1, ["b", 1, 1, "node"], 1.0)
    told(store, 2, ["b", 2, 1, "node"], 40.0)
    told(store, 3, ["c", 1, 1, "node"], 41.0)
    told(store, 4, ["c", 2, 1, "node"], 42.0)
    stop = threading.Event()
    beating = threading.Thread(
        target=lambda: [told(store, 1, ["b", 1, 1, "node"], 0.0) for _ in iter(lambda: stop.wait(0.05), True)]
    )
    beating.start()
    quiet = watched.not_running(store)
    stop.set()
    beating.join()
    assert re.fullmatch(r"silent for 4\d s: stopped or dead, while other ranks of its host send heartbeats", quiet[2])
    assert re.fullmatch(r"silent for 4\d s: its host is dead, or cut off from the host of rank 0", quiet[3])
    assert quiet[3] == quiet[4]
    assert sorted(quiet) == [2, 3, 4]
    assert [watched.host(rank, store) for rank in (2, 3)] == [
        "node (number 1 of that name)",
        "node (number 2 of that name)",
    ]


@pytest.mark.parametrize("ahead", [-3600.0, 3600.0])
def test_a_host_whose_clock_is_wrong_is_not_taken_for_dead(store, ahead):
    watched = PeerProcesses(0, 2, store)
    told(store, 1, ["b", 1, 1, "node"], -ahead)
    assert 1 in watched.not_running(store)  # it says nothing any more
    stop = threading.Event()
    beating = threading.Thread(
        target=lambda: [told(store, 1, ["b", 1, 1, "node"], -ahead) for _ in iter(lambda: stop.wait(0.05), True)]
    )
    beating.start()
    quiet = watched.not_running(store)
    stop.set()
    beating.join()
    assert quiet == {}


def test_a_rank_that_waits_for_a_silent_one_says_so_though_that_had_a_note(store):
    said: list[str] = []
    watch = WaitWatch()
    watch.at("summing the gradients")
    told(store, 1, ["b", 1, 1, "node7"], 50.0)
    store.set("colonnade/waits/1", json.dumps(["summing the gradients", None, time.time() - 50]))
    watch.open(0, 2, said.append)
    until = time.monotonic() + 10
    while not said and time.monotonic() < until:
        time.sleep(0.05)
    watch.close()
    assert "rank 1 (host node7): silent for 5" in said[0]
    assert "(it was last summing the gradients)" in said[0]
    assert "going on" not in said[0]
    assert "does not arrive: the wait ends with an error after" in said[0]


class Stuck:
    """A store whose host is cut off."""

    def clone(self) -> Stuck:
        return self

    def set(self, key: str, value: str) -> None:
        pass

    def check(self, keys: list[str]) -> bool:
        return False

    def compare_set(self, *words: str) -> bytes:
        time.sleep(60)
        return b""


def test_a_rank_that_gets_no_answer_of_the_store_says_that(store, monkeypatch):
    monkeypatch.setattr(waits, "default_store", Stuck)
    monkeypatch.setattr(waits, "_ANSWER_SECONDS", 0.2)
    said: list[str] = []
    watch = WaitWatch()
    watch.at("summing the gradients")
    watch.open(1, 2, said.append)
    until = time.monotonic() + 10
    while not said and time.monotonic() < until:
        time.sleep(0.05)
    watch.close()
    assert (
        "But the store of the world, served by rank 0, does not answer: that rank is stopped or has exited" in said[0]
    )


def _stopped(how: str) -> dict[str, Any]:
    waits.PUBLISH_AFTER, peer_errors.BEAT_SECONDS = 0.3, 0.2
    context = colonnade.launch({}, verbose=False, timeout=3)
    said: list[str] = []
    store = default_store()
    if context.get_global_rank() == 1:
        store.set("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        return {}
    pid = int(store.get("pid"))
    context.waits._thread, thread = None, context.waits._thread
    context.waits._stop.set()
    thread.join()
    context.waits._stop.clear()
    threading.Thread(target=context.waits._watch, args=(0, 2, said.append), daemon=True).start()
    found = ""
    try:
        if how == "in a step":
            with context.waits.during("summing the gradients"):
                dist.all_reduce(torch.ones(1))
        else:
            dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        found = f"{type(error).__name__}: {error}"
        if how != "in a step":
            raise
    finally:
        if how == "in a step":
            os.kill(pid, signal.SIGCONT)
    return {"said": said, "error": found}


def test_a_stopped_rank_is_called_stopped_and_the_error_that_ends_the_wait_names_it():
    found = run_world(2, _stopped, "in a step", backend=None, timeout=40).values[0]
    assert "Where others are: rank 1: stopped (by SIGSTOP" in found["said"][0]
    assert "going on" not in found["said"][0]
    assert found["error"].startswith("GradientError: the wait for other ranks in summing the gradients has timed out (")
    assert "Where the others are: rank 1: stopped (by SIGSTOP" in found["error"]
    assert found["error"].endswith("[C117]")


def test_an_error_of_a_collective_of_ones_own_says_where_the_others_are_when_it_ends_the_rank():
    with pytest.raises(WorldError) as caught:
        run_world(2, _stopped, "of my own", backend=None, timeout=40)
    assert "Where the other ranks are: rank 1: stopped (by SIGSTOP" in caught.value.result.report()

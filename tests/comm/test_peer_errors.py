"""A rank that is stopped, dead or cut off is called that, with its host; the errors of the ranks that wait for it name it."""

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
from torch import nn

import colonnade
from colonnade._launch import launch
from colonnade.checkpoint import CheckpointManager
from colonnade.comm import peer_errors, waits
from colonnade.comm.peer_errors import PeerProcesses, ProcessNote, lost_peer_error
from colonnade.comm.torch_versions import HashStore, default_store
from colonnade.comm.waits import WaitWatch
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.errors import CheckpointError, GradientError
from colonnade.testing import WorldError, run_world

CLOSED = RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:2487. This is typically caused by ...")


def _ended() -> Any:
    """The note of a process that has ended, and that nobody has waited for yet."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    note = ProcessNote.of_this_process()._replace(pid=process.pid, started=peer_errors._start_time(process.pid))
    process.kill()
    while peer_errors._start_time(process.pid) is not None:
        time.sleep(0.01)
    return note, process


def test_a_process_that_has_ended_is_told_from_one_that_goes_on():
    own, (ended, process) = ProcessNote.of_this_process(), _ended()
    assert not own.has_exited()
    assert ended.has_exited()  # not waited for: a zombie
    process.wait()
    assert ended.has_exited()
    assert own._replace(started=own.started - 1).has_exited()  # its number was given again


def test_a_process_of_another_host_is_not_looked_for_here(monkeypatch):
    store, (ended, process) = HashStore(), _ended()
    process.wait()
    ranks = [PeerProcesses(rank, 2, store) for rank in range(2)]
    store.set("colonnade/process/1", json.dumps(ended._replace(machine="elsewhere")))
    assert ranks[0].exited(0) == []


def test_the_first_rank_that_looks_tells_the_others(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "")
    store, (ended, process) = HashStore(), _ended()
    ranks = [PeerProcesses(rank, 4, store) for rank in range(4)]
    assert ranks[0].exited(0) == []
    store.set("colonnade/process/2", json.dumps(ended))
    assert ranks[1].exited(0) == [2]
    store.set("colonnade/process/0", json.dumps(ended))  # left because of the first
    assert ranks[3].exited(0) == [2]
    process.wait()


def test_errors_of_other_kinds_are_left_as_they_are(monkeypatch):
    monkeypatch.setattr(peer_errors, "_EXIT_SECONDS", 0)
    processes = PeerProcesses(0, 2, HashStore())
    assert lost_peer_error(RuntimeError("shapes differ"), "summing", processes) is None
    assert lost_peer_error(KeyboardInterrupt(), "summing", processes) is None
    assert lost_peer_error(GradientError("Connection closed by peer", code="C043"), "summing", processes) is None
    assert lost_peer_error(CLOSED, "summing", None) is None
    said = lost_peer_error(CheckpointError(f"saving: {CLOSED}"), "summing", processes)
    assert isinstance(said, CheckpointError)
    assert "a rank has exited" in str(said)


def test_an_error_is_where_a_rank_is_until_it_goes_on():
    watch = WaitWatch()
    with pytest.raises(ValueError, match="bad"), watch.during("summing"):
        raise ValueError("bad")
    assert watch._place[0] == "outside the engine, after an error summing: ValueError: bad"
    with watch.during("saving"):
        pass
    assert watch._place[0] == "outside the engine"


def _dies(config: dict[str, Any], where: str, folder: str) -> tuple[str, str, float]:
    """Rank 1 is killed in step 2, before it comes to `where`."""
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        model = nn.Linear(4, 3)
        engine = initialize(model, lambda p: torch.optim.SGD(p, lr=0.1), context=gpc)[0]
        manager = CheckpointManager(folder, context=gpc)

        def die() -> None:
            if gpc.get_global_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)

        def part(of: Any, name: str) -> None:
            before = getattr(of, name)
            setattr(of, name, lambda *args, **options: (die(), before(*args, **options))[1])

        def steps(count: int) -> None:
            for _ in engine.batches(range(count)):
                engine.zero_grad()
                out = engine(torch.ones(2, 4))
                engine.backward((out.sum(), out.numel()))
                engine.step()

        steps(2)
        began = time.monotonic()
        try:
            if where == "save":
                meet = gpc.waits._meet
                gpc.waits._meet = lambda *call: (meet(*call), die())  # type: ignore[method-assign]
                manager.save(2, model=engine.model)
            else:
                of, name = {
                    "vote": (engine._book, "any_rank_has_batch"),
                    "counts": (engine._book, "scale"),
                    "norm": (engine._stepper, "step"),
                }[where]
                part(of, name)
                steps(2)
        except Exception as error:
            return type(error).__name__, str(error), time.monotonic() - began
        raise AssertionError("nobody noticed")


@pytest.mark.parametrize("where", ["vote", "counts", "norm", "save"])
def test_a_rank_that_dies_outside_the_sums_of_gradients_is_lost_peer_error(where, tmp_path):
    config = {"sync": {"shared_memory": False}, "clip_grad_norm": 1.0, "zero": 1}
    found = run_world(2, _dies, config, where, str(tmp_path), timeout=30, check=False).outcomes[0]
    assert found.ok, found.headline
    kind, said, seconds = found.value
    assert "rank 1 has exited while this rank was" in said, said
    assert said.endswith("[C043]")
    assert kind in ("GradientError", "CheckpointError")
    assert seconds < 5


def _never_comes() -> str:
    waits.PUBLISH_AFTER = 0.2
    with launch({}, context=ParallelContext(), verbose=False) as gpc:
        if gpc.get_global_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(GradientError) as caught, gpc.waits.together("a save"):
            pass
        return str(caught.value)


def test_a_rank_that_died_before_a_call_for_all_ranks_is_lost_peer_error():
    found = run_world(2, _never_comes, timeout=30, check=False).outcomes[0]
    assert found.ok, found.headline
    assert found.value == "a save must be called on all ranks, but rank 1 has exited [C043]"


# -- ranks that are heard no more ---
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
        "But the store of the world, served by rank 0, does not answer. There are three possible causes: that rank is stopped or has exited"
        in said[0]
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

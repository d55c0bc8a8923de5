"""A rank that dies while others wait for it in a collective: their errors name it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
from torch import nn

from colonnade._launch import launch
from colonnade.checkpoint import CheckpointManager
from colonnade.comm import peer_errors, waits
from colonnade.comm.peer_errors import PeerProcesses, ProcessNote, lost_peer_error
from colonnade.comm.torch_versions import HashStore
from colonnade.comm.waits import WaitWatch
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.errors import CheckpointError, GradientError
from colonnade.testing import run_world

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

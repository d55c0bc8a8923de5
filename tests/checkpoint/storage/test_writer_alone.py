"""One save without a world: how long its notes are waited for, in which order it is on disk, and when it makes haste."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from colonnade.checkpoint import CheckpointManager
from colonnade.checkpoint import save as module
from colonnade.checkpoint.manifest import LayoutRecord
from colonnade.checkpoint.save import BackgroundSave, Pace, SavePlan, StorageWriter
from colonnade.checkpoint.tensor_files import FileEntry
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import CheckpointError


def writer_of(folder: Path, ranks: int = 2, rank: int = 0) -> StorageWriter:
    staged = folder / ".tmp-5-00000000"
    staged.mkdir(exist_ok=True)
    return StorageWriter(5, staged, rank, LayoutRecord(ranks, (("data", ranks, "data"),)), 0, 3)


@pytest.fixture
def clock(monkeypatch):
    """A time that passes only while somebody waits, and whether the main thread is there."""
    state = SimpleNamespace(now=0.0, alive=True)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: state.now))
    main = SimpleNamespace(is_alive=lambda: state.alive)
    monkeypatch.setattr(module, "threading", SimpleNamespace(main_thread=lambda: main, Event=threading.Event))
    return state


class Stop:
    """An event that is never set; waiting for it lets time pass, and things happen at their time."""

    def __init__(self, clock, events):
        self.clock, self.events = clock, events

    def wait(self, seconds):
        self.clock.now += 5
        for at in [at for at in self.events if at <= self.clock.now]:
            self.events.pop(at)()
        return False


def test_while_the_process_lives_the_notes_are_waited_for_without_a_limit(tmp_path, clock):
    writer = writer_of(tmp_path)
    writer._note_file(0).touch()
    writer.wait_for_notes(Stop(clock, {1000: writer._note_file(1).touch}))
    assert clock.now == 1000


def test_a_process_that_has_ended_gives_up_a_minute_later_and_not_before(tmp_path, clock):
    writer = writer_of(tmp_path)
    writer._note_file(0).touch()
    ended = {500: lambda: setattr(clock, "alive", False)}
    with pytest.raises(CheckpointError, match=r"abandoned after 565\.0 s, because ranks \[1\] have not written"):
        writer.wait_for_notes(Stop(clock, dict(ended)))
    clock.now, clock.alive = 0.0, True
    writer.wait_for_notes(Stop(clock, {**ended, 555: writer._note_file(1).touch}))


def test_a_save_whose_other_ranks_are_gone_is_given_up(tmp_path, monkeypatch):
    def gone(*_: object) -> None:
        raise RuntimeError("connection closed")

    plan = SavePlan(0, entries=[FileEntry.of("a", torch.ones(2))])
    pending = BackgroundSave(writer_of(tmp_path), plan)
    monkeypatch.setattr(module, "gather_from_all", gone)
    with pytest.raises(RuntimeError, match="connection closed"):
        pending.finish(ParallelContext())
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="the other ranks have exited"):
        pending.finish(ParallelContext())
    assert (pending.is_writing, plan.entries, list(tmp_path.iterdir())) == (False, [], [])


def test_a_process_does_not_wait_for_a_save_that_it_will_give_up(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_PATIENCE_AFTER_ERROR", 0.1)
    pending = BackgroundSave(writer_of(tmp_path), SavePlan(0))
    before = {*threading.enumerate()}
    pending.give_up_soon()
    assert all(thread.daemon for thread in {*threading.enumerate()} - before)
    with pytest.raises(CheckpointError, match=r"step 5 was abandoned .* ranks \[1\]"):
        pending.finish(ParallelContext())


@pytest.mark.parametrize(("worked", "rest"), [(0.01, 0.05), (1.0, 0.5)])
def test_a_rest_is_several_times_as_long_as_the_work_before_it_and_never_long(monkeypatch, worked, rest):
    times = iter([1.0, 1.0 + worked, 9.0])  # on a processor, at each rest and after it
    waited: list[float] = []
    monkeypatch.setattr(module, "time", SimpleNamespace(thread_time=lambda: next(times)))
    pace = Pace()
    pace._hurry = SimpleNamespace(wait=waited.append)  # type: ignore[assignment]
    pace.rest()
    pace.rest()
    assert waited == pytest.approx([0.0, rest])


def test_nobody_rests_while_somebody_waits():
    pace, end = Pace(), time.thread_time() + 0.05
    pace.rest()
    while time.thread_time() < end:
        pass
    pace.hurry()
    began = time.monotonic()
    pace.rest()
    assert time.monotonic() - began < 0.2


def test_all_of_a_save_is_on_disk_before_it_gets_its_name_and_its_name_after(tmp_path, synced):
    with CheckpointManager(tmp_path, ParallelContext()) as manager:
        manager.save(1, nn.Linear(1, 1))
    (checkpoint,) = tmp_path.glob("step-*")
    tensors, manifest, staged, run = synced
    assert tensors == ("rank-00000.safetensors", (checkpoint / "rank-00000.safetensors").stat().st_size)
    assert manifest == ("manifest.json", (checkpoint / "manifest.json").stat().st_size)
    assert staged[0].startswith(".tmp-1-")
    assert run[0] == tmp_path.name

"""One save, without a world: how long its notes are waited for, what is published, and when it makes haste."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from colonnade.checkpoint import CheckpointManager
from colonnade.checkpoint import storage as module
from colonnade.checkpoint.manifest import LayoutRecord
from colonnade.checkpoint.save import RankNote, SavePlan
from colonnade.checkpoint.storage import BackgroundWriter, Pace, StorageWriter
from colonnade.checkpoint.tensor_files import FileEntry
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import CheckpointError


def storage(folder: Path, ranks: int = 2, rank: int = 0) -> StorageWriter:
    staged = folder / ".tmp-5-00000000"
    staged.mkdir(exist_ok=True)
    return StorageWriter(5, staged, rank, LayoutRecord(ranks, (("data", ranks, "data"),)), 0, 3)


@pytest.fixture
def clock(monkeypatch):
    """A time that passes only while somebody waits, and whether the main thread is there."""
    state = SimpleNamespace(now=0.0, alive=True, at=None)
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
    one = storage(tmp_path)
    one._note_file(0).touch()
    one.wait_for_notes(Stop(clock, {1000: one._note_file(1).touch}))
    assert clock.now == 1000


def test_a_process_that_has_ended_gives_up_a_minute_later_and_not_before(tmp_path, clock):
    one = storage(tmp_path)
    one._note_file(0).touch()
    ended = {500: lambda: setattr(clock, "alive", False)}
    with pytest.raises(CheckpointError, match=r"given up after 565.0 s: ranks \[1\] have not written"):
        one.wait_for_notes(Stop(clock, dict(ended)))
    clock.now, clock.alive = 0.0, True
    one.wait_for_notes(Stop(clock, {**ended, 555: one._note_file(1).touch}))


def test_whoever_gives_up_is_heard_at_once(tmp_path):
    stop = threading.Event()
    stop.set()
    with pytest.raises(CheckpointError, match=r"step 5 was given up .* ranks \[0, 1\]"):
        storage(tmp_path).wait_for_notes(stop)


def test_a_folder_that_this_rank_does_not_see_is_refused_after_a_while(tmp_path, monkeypatch):
    one = storage(tmp_path, rank=1)
    one.check_visible()
    monkeypatch.setattr(module, "_VISIBLE_WITHIN", 0.2)
    one.staged.rmdir()
    begin = time.monotonic()
    with pytest.raises(CheckpointError, match=r"rank 1 .* does not see"):
        one.check_visible()
    assert time.monotonic() - begin >= 0.2


def test_only_the_first_rank_drops_what_is_left(tmp_path):
    storage(tmp_path, rank=1).drop()
    assert storage(tmp_path).staged.is_dir()
    first = storage(tmp_path)
    for _ in range(2):  # there may be nothing yet
        first.drop()
        assert not list(tmp_path.iterdir())


def test_work_is_followed_by_rests_until_somebody_waits():
    pace, rests = Pace(), []
    pace._hurry = SimpleNamespace(wait=rests.append, set=lambda: rests.append("hurry"))
    pace.rest()
    end = time.thread_time() + 0.02
    while time.thread_time() < end:
        pass
    pace.rest()
    pace.hurry()
    assert rests[0] == 0
    assert 0.1 <= rests[1] <= 0.5  # five times as long as the work, and half a second at most
    assert rests[2] == "hurry"


def test_a_rest_is_several_times_as_long_as_the_work_before_it_and_never_long(monkeypatch):
    times = iter([1.0, 1.01, 2.0, 3.0, 4.0])  # on a processor: before and after each rest
    waited: list[float] = []
    monkeypatch.setattr(module, "time", SimpleNamespace(thread_time=lambda: next(times)))
    pace = Pace()
    pace._hurry = SimpleNamespace(wait=waited.append)  # type: ignore[assignment]
    for _ in range(3):
        pace.rest()
    assert waited == pytest.approx([0.0, 0.05, 0.5])


def test_all_of_a_save_is_on_disk_before_it_gets_its_name_and_its_name_after(tmp_path, synced):
    with CheckpointManager(tmp_path, ParallelContext()) as manager:
        manager.save(1, nn.Linear(1, 1))
    (checkpoint,) = tmp_path.glob("step-*")
    tensors, manifest, staged, run = synced
    assert tensors == ("rank-00000.safetensors", (checkpoint / "rank-00000.safetensors").stat().st_size)
    assert manifest == ("manifest.json", (checkpoint / "manifest.json").stat().st_size)
    assert staged[0].startswith(".tmp-1-")
    assert run[0] == tmp_path.name


def test_a_thread_writes_lets_the_copies_go_and_says_what_went_wrong(tmp_path):
    for ranks, rank, wrong in ((1, 0, None), (2, 1, None), (2, 1, "saving step 5 in the background")):
        plan = SavePlan(RankNote(rank, None), [FileEntry.of("a", torch.ones(2))])
        one = storage(tmp_path, ranks, rank)
        if wrong is not None:
            one.staged.rename(tmp_path / "elsewhere")
        beside = BackgroundWriter(one, plan)
        told = beside.part_error()
        assert told is None if wrong is None else wrong in str(told)
        beside.join()
        assert not beside.is_writing
        assert beside._pace._hurry.is_set()  # no more rests
        assert plan.entries == []
        assert str(beside.error or "") == (told or "")
    assert (tmp_path / "step-00000005").is_dir()


def test_a_process_does_not_wait_for_a_save_that_it_will_give_up(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_PATIENCE_AFTER_ERROR", 30.0)
    beside = BackgroundWriter(storage(tmp_path), SavePlan(RankNote(0, None)))
    beside.give_up_soon()
    (timer,) = (thread for thread in threading.enumerate() if getattr(thread, "function", None) == beside.give_up)
    assert timer.daemon
    timer.cancel()
    assert beside.is_writing  # the other rank's note is not there
    beside.give_up("it was a test")
    beside.join()
    assert str(beside.error).startswith("it was a test")

"""Ranks that stand still say where they are, one of those that wait says where the others are, and where the time of a step goes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from colonnade.comm import waits
from colonnade.comm.torch_versions import HashStore
from colonnade.comm.waits import OUTSIDE, PhaseClock, WaitWatch, stalled_details
from colonnade.errors import GradientError


@pytest.fixture
def store(monkeypatch):
    """A store in which four ranks have written that they go on."""
    store = HashStore()
    monkeypatch.setattr(waits, "default_store", lambda: store)
    monkeypatch.setattr(waits, "PUBLISH_AFTER", 0.1)
    for rank in range(4):
        store.set(f"colonnade/waits/{rank}", "")
    return store


def _stand(store, rank: int, what: str, step: int | None) -> None:
    store.set(f"colonnade/waits/{rank}", json.dumps([what, step, time.time() - 9]))
    store.set("colonnade/waits/needs all", str(rank))


def _opened(said: list[str], spoke: threading.Event, rank: int = 0) -> WaitWatch:
    watch = WaitWatch()
    watch.open(rank, 4, lambda text: (said.append(text), spoke.set()))
    return watch


def test_after_a_block_a_rank_is_where_it_was_before():
    watch = WaitWatch()
    with watch.during("saving"):
        with watch.during("summing"):
            assert watch._place[0] == "summing"
        assert watch._place[0] == "saving"
    assert watch._place[0] == OUTSIDE


def test_steps_are_counted_from_the_engine_on():
    watch = WaitWatch()
    assert watch._place[:2] == (OUTSIDE, None)
    for _ in range(2):
        watch.begin("in initialize()")
        assert (watch.step, watch._place[:2]) == (None, ("in initialize()", None))
        for step in range(3):
            watch.at("elsewhere")
            watch.end_step()
            assert (watch.step, watch._place[:2]) == (step, (OUTSIDE, step))


class Noted:
    """A store that keeps what is written of rank 0, and when."""

    def __init__(self, store: HashStore) -> None:
        self._store, self.written = store, []

    def set(self, key: str, value: str) -> None:
        if key == "colonnade/waits/0":
            self.written.append((value, time.time()))
        self._store.set(key, value)

    def clone(self) -> Noted:
        return self

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)


@pytest.mark.parametrize("what", [OUTSIDE, "summing the gradients"])
def test_a_rank_that_stands_still_writes_it_down_once_and_speaks_only_of_waits_inside_a_step(store, monkeypatch, what):
    noted, said = Noted(store), []
    monkeypatch.setattr(waits, "default_store", lambda: noted)
    watch = WaitWatch()
    watch.at(what)
    watch.open(0, 4, lambda text: said.append((text, time.time())))
    time.sleep(0.35)  # of which 0.1 is until it is written down, and 0.15 until it is said
    watch.close()
    since = watch._place[2]
    assert [value for value, _ in noted.written] == ["", json.dumps([what, None, since])]
    assert noted.written[1][1] - since > 0.1
    assert len(said) == (what != OUTSIDE)
    assert all(at - since > 0.15 for _, at in said)


def test_a_rank_that_stands_still_tells_more_if_it_knows_more(store):
    assert stalled_details(1) is None
    assert stalled_details(9) is None  # of which the store knows nothing
    _stand(store, 1, "summing the gradients", 3)
    assert stalled_details(1) == ("summing the gradients of step 3", None)
    watch = _opened([], threading.Event())
    watch.details = lambda: {"calls": 2}
    _until(lambda: stalled_details(0) is not None)
    assert stalled_details(0) == (OUTSIDE, {"calls": 2})
    watch.close()


def _until(come: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not come():
        assert time.monotonic() < end
        time.sleep(0.005)


def _come_together(ranks: int, after: float) -> list[float]:
    """When each rank of so many goes on: the last comes so many seconds after the others."""
    done: list[float] = []

    def come(wait: float) -> None:
        time.sleep(wait)
        WaitWatch()._meet("save()", ranks)
        done.append(time.monotonic())

    threads = [threading.Thread(target=come, args=(after * (at == 0),), daemon=True) for at in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return done


@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_go_on_when_all_have_come_every_time(store, monkeypatch, ranks):
    monkeypatch.setattr(waits, "PUBLISH_AFTER", 5.0)
    for round_ in (1, 2):
        begun = time.monotonic()
        done = _come_together(ranks, after=0.05)
        assert len(done) == ranks
        assert min(done) - begun >= 0.05
        assert store.add("colonnade/meet/save()", 0) == ranks * round_


@pytest.mark.parametrize(
    ("step", "limit", "least", "message"),
    [
        (3, 30, 0.15, r"rank 2 is summing the gradients of step 3 and waits for this rank"),
        (
            4,
            0.3,
            0.3,
            r"save\(\) must be called on all ranks, but 3 ranks did not call it within 0\.3 s",
        ),  # that step was made
    ],
)
def test_a_rank_that_waits_for_others_who_never_come_says_why(store, monkeypatch, step, limit, least, message):
    monkeypatch.setattr(waits, "timeout_of", lambda: timedelta(seconds=limit))
    _stand(store, 2, "summing the gradients", 3)
    watch = WaitWatch()
    watch.step = step
    begun = time.monotonic()
    with pytest.raises(GradientError, match=message):
        watch._meet("save()", 4)
    assert time.monotonic() - begun >= least
    assert store.add("colonnade/meet/save()", 0) == 0  # as if it had not come


def test_without_a_world_nobody_is_waited_for():
    watch = WaitWatch()
    with watch.together("save()"):
        assert watch._place[0] == f"{OUTSIDE}, in save()"
    assert watch._place[0] == OUTSIDE


def test_a_rank_that_waits_says_where_the_others_are(store):
    said: list[str] = []
    spoke = threading.Event()
    watch = _opened(said, spoke)
    watch.step = 6
    _stand(store, 1, OUTSIDE, 6)
    _stand(store, 2, "adding up the counts of the losses", 7)
    _stand(store, 3, "summing the gradients", 7)
    watch.end_step()
    with watch.during("summing the gradients"):
        assert spoke.wait(20)
        assert json.loads(store.get("colonnade/waits/0"))[:2] == ["summing the gradients", 7]
    watch.close()
    assert (
        "it is summing the gradients of step 7. Where others are: rank 1: outside the engine after 6 steps for"
        in said[0]
    )
    assert "rank 2: adding up the counts of the losses of step 7 for" in said[0]
    assert "rank 3" not in said[0]


@pytest.mark.parametrize(
    ("rank", "others"), [(0, {1: "here", 2: "here", 3: "here"}), (3, {0: "here", 1: "here", 2: "here"})]
)
def test_nothing_is_said_where_all_are_at_one_place(store, rank, others):
    for other, place in others.items():
        _stand(store, other, place, None)
    watch = WaitWatch()
    watch.at("here")
    assert watch._explain(rank, 4, waits.RankPosition(*watch._place)) is None
    watch.at("there")
    assert watch._explain(rank, 4, waits.RankPosition(*watch._place)) is not None


class Counted:
    """A store that counts, for all ranks together, how many keys are read and written."""

    def __init__(self) -> None:
        self._store, self.keys, self._lock = HashStore(), dict[str, int](), threading.Lock()

    def clone(self) -> Counted:
        return self

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(first: Any, *rest: Any) -> Any:
            with self._lock:
                self.keys[name] = self.keys.get(name, 0) + (len(first) if isinstance(first, list) else 1)
            return getattr(self._store, name)(first, *rest)

        return call


def _wait_together(monkeypatch, ranks: int, seconds: float) -> tuple[dict[str, int], list[str]]:
    """(Keys read and written, what was said) while all ranks but the last wait inside a step."""
    store, said = Counted(), []
    monkeypatch.setattr(waits, "default_store", lambda: store)
    watches = [WaitWatch() for _ in range(ranks)]
    for rank, watch in enumerate(watches):
        watch.at(OUTSIDE if rank == ranks - 1 else "summing the gradients")
        watch.open(rank, ranks, said.append)
    time.sleep(seconds)
    for watch in watches:
        watch._stop.set()
    for watch in watches:
        watch.close()
    return store.keys, said


def test_a_wait_costs_the_store_as_many_keys_as_there_are_ranks(monkeypatch):
    monkeypatch.setattr(waits, "PUBLISH_AFTER", 0.2)
    counts = {}
    for ranks in (2, 4, 8, 16):
        keys, said = _wait_together(monkeypatch, ranks, 1.2)
        counts[ranks] = sum(keys.values())
        assert len(said) >= 1, keys
        # On a busy machine the note of a rank may come after the first look.
        assert any(f"rank {ranks - 1}: outside the engine" in text for text in said), said
    print(counts)
    # A note, a sign of life and a look of each rank, and what one rank reads of all two or three times: not a key for each pair.
    assert all(count <= 22 * ranks for ranks, count in counts.items()), counts


def test_another_rank_looks_where_the_one_that_looked_goes_on_or_stays_away(store):
    said: list[tuple[int, str]] = []
    _stand(store, 3, OUTSIDE, 7)
    watches = [WaitWatch() for _ in range(3)]
    for rank, watch in enumerate(watches):
        watch.at("summing the gradients")
        watch.open(rank, 4, lambda text, rank=rank: said.append((rank, text)))
    _until(lambda: bool(said))
    first = said[0][0]
    watches[first].at(OUTSIDE)
    _until(lambda: any(rank != first for rank, _ in said))
    for watch in watches:
        watch.close()


def test_a_rank_that_looks_for_a_dead_one_waits_longer_and_looks_then(store):
    store.set("colonnade/waits/looks", "2 7.5")  # by a rank that was killed
    said: list[str] = []
    watch = _opened(said, spoke := threading.Event())
    watch.at("here")
    assert spoke.wait(20)
    assert "going on" in said[0]
    watch.close()


def test_a_rank_that_goes_on_or_is_outside_says_nothing_and_takes_its_note_back(store):
    said: list[str] = []
    watch = _opened(said, threading.Event())
    until = time.monotonic() + 20
    while not store.get("colonnade/waits/0") and time.monotonic() < until:
        time.sleep(0.01)
    assert json.loads(store.get("colonnade/waits/0"))[0] == OUTSIDE
    while store.get("colonnade/waits/0") and time.monotonic() < until:
        watch.at("on the way")
        time.sleep(0.01)
    assert not store.get("colonnade/waits/0")
    watch.close()
    assert said == []
    assert not any(thread.name == "colonnade waits" for thread in threading.enumerate())


@pytest.mark.parametrize(("ranks", "watches"), [(1, False), (2, True)])
def test_a_world_of_several_ranks_is_watched_until_it_is_closed(store, monkeypatch, ranks, watches):
    watch, at_exit = WaitWatch(), []
    monkeypatch.setattr(waits, "atexit", SimpleNamespace(register=at_exit.append, unregister=at_exit.remove))
    store.delete_key("colonnade/waits/0")
    watch.open(0, ranks, lambda text: None)
    thread = watch._thread
    assert (thread is not None and thread.is_alive() and thread.daemon) is watches
    assert store.check(["colonnade/waits/0"]) is watches
    assert at_exit == [watch.close] * watches
    watch.close()
    assert at_exit == []
    assert thread is None or not thread.is_alive()


def test_pauses_grow_twofold_up_to_the_longest() -> None:
    found = [*islice(waits.pauses(0.05), 12)]
    assert found == pytest.approx([*(0.0001 * 2**at for at in range(9)), 0.05, 0.05, 0.05])


# -- the time of a step ---
def test_phases_add_up_to_the_step_and_nested_ones_are_taken_out():
    waits = WaitWatch()
    clock = waits.clock = PhaseClock(torch.device("cpu"))
    begun = time.perf_counter()
    clock.restart()
    with waits.during("in the passes", "forward"):
        time.sleep(0.02)
        with waits.during("waiting", "communication"):
            time.sleep(0.04)
        with waits.during("in no phase"):
            time.sleep(0.02)
    with waits.during("in the step", "optimizer"):
        time.sleep(0.01)
    times = clock.end_step().read()
    whole = time.perf_counter() - begun
    assert set(times) == {"other", "forward", "communication", "optimizer"}
    assert times["forward"] >= 0.04
    assert times["communication"] >= 0.04
    assert times["optimizer"] >= 0.01
    assert sum(times.values()) == pytest.approx(whole, abs=0.01)
    assert clock.end_step().read()["other"] < times["forward"]  # the next step begins where it ended


class Event:
    """Stands for an event of a device: two seconds pass from one to the next, and it can be read when it was waited for."""

    made: list[Event] = []

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at, self.waited = None, False

    def record(self) -> None:
        self.made.append(self)
        self.at = 2000.0 * len(self.made)

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, end: Event) -> float:
        assert self.made[-1].waited
        return end.at - self.at


def test_on_a_device_events_tell_the_time(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "made", [])
    clock = PhaseClock(torch.device("cuda"))
    assert clock.enter("forward") == "other"
    assert clock.enter("forward") == "forward"
    assert clock.enter("other") == "forward"
    assert clock.end_step().read() == {"other": 4.0, "forward": 2.0}


def test_without_a_clock_nothing_is_kept():
    waits = WaitWatch()
    assert waits.enter("forward") is None
    with waits.during("somewhere", "forward"):
        pass

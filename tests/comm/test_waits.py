"""Ranks that stand still say where they are, and one of those that wait says where the others are."""

from __future__ import annotations

import json
import threading
import time

import pytest

from colonnade.comm import waits
from colonnade.comm.torch_versions import HashStore
from colonnade.comm.waits import OUTSIDE, WaitWatch


@pytest.fixture
def store(monkeypatch):
    """A store in which four ranks have written that they go on."""
    store = HashStore()
    monkeypatch.setattr(waits, "default_store", lambda: store)
    monkeypatch.setattr(waits, "SAY_AFTER", 0.1)
    for rank in range(4):
        store.set(f"colonnade/waits/{rank}", "")
    return store


def _stand(store, rank: int, what: str, step: int | None) -> None:
    store.set(f"colonnade/waits/{rank}", json.dumps([what, step, time.time() - 9]))


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
    ("rank", "others"), [(0, {1: "here", 2: "here", 3: "here"}), (1, {0: "here", 2: OUTSIDE, 3: "here"})]
)
def test_nothing_is_said_where_all_are_at_one_place_or_a_lower_rank_says_it(store, rank, others):
    for other, place in others.items():
        _stand(store, other, place, None)
    watch, said = WaitWatch(), []
    watch.at("here")
    assert watch._explain(rank, 4, waits._Place(*watch._place)) is None
    watch.at("there")
    assert watch._explain(rank, 4, waits._Place(*watch._place)) is not None
    assert said == []


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
def test_a_world_of_several_ranks_is_watched_until_it_is_closed(store, ranks, watches):
    watch = WaitWatch()
    watch.open(0, ranks, lambda text: None)
    thread = watch._thread
    assert (thread is not None and thread.is_alive()) is watches
    watch.close()
    assert thread is None or not thread.is_alive()

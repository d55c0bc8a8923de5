"""Where the time of a step goes, on the host's clock."""

from __future__ import annotations

import time

import pytest
import torch

from colonnade.comm.waits import PhaseClock, WaitWatch


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

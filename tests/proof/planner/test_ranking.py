"""Step times of eight layouts on this machine: is their order the planned one? `python -m tests.proof.planner.test_ranking` shows both."""

from __future__ import annotations

from itertools import combinations

import pytest

from colonnade.config import load_config
from colonnade.proof.planner.hardware import measure_machine
from colonnade.proof.planner.plan import plan
from colonnade.testing import run_world
from tests.proof.planner.jobs import JOBS
from tests.proof.planner.real import counted_step
from tests.proof.planner.test_against_run import BY_GROUP, LAYOUTS

SIZE = dict(hidden=256, length=128, vocabulary=2048)
"""Large enough that a step computes, and does not only call."""
ROUNDS, STEPS, TIE = 3, 5, 0.03


def planned_and_measured() -> dict[str, tuple[float, float]]:
    """(planned, measured) seconds of a step of each layout. Layouts take turns; of the rounds the fastest counts, as others use
    this machine too."""
    machine = measure_machine(4)
    configs = {name: {**settings, "sync": BY_GROUP, "SIZE": SIZE} for name, (_, _, settings) in LAYOUTS.items()}
    planned, measured = {}, {name: float("inf") for name in LAYOUTS}
    for name, (job, ranks, _) in LAYOUTS.items():
        planned[name] = plan(load_config(configs[name]), ranks, machine, JOBS[job]).totals.step_seconds
    for _ in range(ROUNDS):
        for name, (job, ranks, _) in LAYOUTS.items():
            quick = {"TORCH_DISTRIBUTED_DEBUG": "OFF"}  # as users train
            real = run_world(
                ranks, counted_step, configs[name], job, STEPS, backend=None, env=quick, timeout=200
            ).values
            measured[name] = min(measured[name], max(one.seconds for one in real))
    return {name: (planned[name], measured[name]) for name in LAYOUTS}


def in_order(times: dict[str, tuple[float, float]]) -> int:
    """How many layouts stand in the planned order: the most that can be left with no two the other way round.

    Two whose measured times are within `TIE` of each other have no order.
    """
    row = [measured for _, measured in sorted(times.values())]
    for count in range(len(row), 0, -1):
        for left in combinations(row, count):
            if all(before <= (1 + TIE) * after for before, after in combinations(left, 2)):
                return count
    return 0


def test_the_order_that_is_left_when_some_are_taken_out() -> None:
    assert in_order({"a": (1, 10), "b": (2, 20), "c": (3, 30)}) == 3
    assert in_order({"a": (1, 30), "b": (2, 10), "c": (3, 20)}) == 2
    assert in_order({"a": (1, 30), "b": (2, 20), "c": (3, 10)}) == 1
    assert in_order({"a": (1, 10.2), "b": (2, 10), "c": (3, 30)}) == 3


@pytest.mark.long
@pytest.mark.timeout(900)
def test_seven_of_eight_step_times_are_in_the_planned_order() -> None:
    times = planned_and_measured()
    assert in_order(times) >= 7, times


if __name__ == "__main__":
    found = planned_and_measured()
    for name, (before, after) in sorted(found.items(), key=lambda each: each[1]):
        print(f"{name:12s} planned {1e3 * before:7.1f} ms, measured {1e3 * after:7.1f} ms, {before / after:.2f}")
    print(f"{in_order(found)} of {len(found)} in the planned order")

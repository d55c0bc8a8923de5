"""The simulator's times by hand, with other costs, and its picture."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given

from colonnade.engine.schedule.actions import Table, parse_table
from colonnade.engine.schedule.orders import make_table
from colonnade.engine.schedule.replay import Costs, milestone, needed, num_stages, simulate
from colonnade.errors import ScheduleError
from tests.engine.schedule.tables import valid_tables


def test_times_by_hand() -> None:
    timeline = simulate(parse_table(["0F0 0B0", "1F0 1I0 1W0"]))
    assert [(str(timed.action), timed.start, timed.end) for timed in timeline.rows[0]] == [("0F0", 0, 1), ("0B0", 3, 5)]
    assert [(str(timed.action), timed.start, timed.end) for timed in timeline.rows[1]] == [
        ("1F0", 1, 2),
        ("1I0", 2, 3),
        ("1W0", 3, 4),
    ]
    assert timeline.makespan == 5
    assert timeline.bubble == pytest.approx(1 - 6 / 10)
    assert timeline.peak_live == {0: 1, 1: 1}


def test_given_costs_and_transfers() -> None:
    table = parse_table(["0F0 0B0", "1F0 1B0"])
    timeline = simulate(table, Costs(forward=2, input=3, weight=4, transfer=0.5))
    assert timeline.rows[1][0].start == 2.5
    assert timeline.makespan == 2 + 0.5 + 2 + 7 + 0.5 + 7


def test_transfers_inside_a_rank_are_free() -> None:
    assert simulate(parse_table(["0F0 1F0 1B0 0B0"]), Costs(transfer=5)).makespan == 6


@given(valid_tables())
def test_nothing_starts_before_what_it_needs(table: Table) -> None:
    timeline = simulate(table)
    ends = {milestone(timed.action): timed.end for row in timeline.rows.values() for timed in row}
    for row in timeline.rows.values():
        for before, timed in pairwise(row):
            assert timed.start >= before.end
        for timed in row:
            assert all(ends[need] <= timed.start for need in needed(timed.action, num_stages(table) - 1))
    assert 0 <= timeline.bubble < 1


def test_the_picture() -> None:
    assert simulate(make_table("1f1b", 2, 2)).picture().splitlines() == [
        "rank 0 |F0 F1 .  .  B0 -- .  B1 --",
        "rank 1 |.  F0 B0 -- F1 B1 -- .  .",
    ]
    assert simulate(make_table("zb_v", 1, 1, 2)).picture() == "rank 0 |0F0 1F0 1I0 0I0 1W0 0W0"


def test_costs_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ScheduleError, match="above 0"):
        Costs(forward=0)
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate(parse_table(["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"]))

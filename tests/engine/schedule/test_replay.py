"""The walk that everything else is built on, by hand."""

from __future__ import annotations

from colonnade.engine.schedule.actions import Action, parse_table
from colonnade.engine.schedule.replay import Milestone, live_counts, needed, num_stages, replay


def test_a_micro_batch_is_held_until_its_last_backward_action() -> None:
    (row,) = parse_table(["0F0 0I0 0F1 0W0 0B1"]).values()
    assert live_counts(row) == [1, 1, 2, 2, 1]
    (two_chunks,) = parse_table(["0F0 1F0 1B0 0B0"]).values()
    assert live_counts(two_chunks) == [0.5, 1, 1, 0.5]


def test_what_each_action_waits_for() -> None:
    def needs(text: str) -> list[Milestone]:
        return needed(Action.parse(text), last_stage=2)

    assert needs("0F4") == []
    assert needs("1F4") == [Milestone(0, 4, "output")]
    assert needs("2B4") == [Milestone(2, 4, "output")]
    assert needs("1I4") == [Milestone(1, 4, "output"), Milestone(2, 4, "input gradient")]
    assert needs("1W4") == [Milestone(1, 4, "input gradient")]


def test_a_walk_that_cannot_end_ends_and_says_who_waits_for_what() -> None:
    table = parse_table(["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"])
    run = replay(table, cost=lambda action: 1.0)
    assert run.stuck == {0: Milestone(1, 0, "input gradient"), 1: Milestone(0, 1, "output")}
    assert [len(row) for row in run.rows.values()] == [1, 1]
    assert num_stages(table) == 2
    assert num_stages({0: []}) == 0

"""The walk over a table by hand, and the checker: it passes what can run and stops what cannot, with the faulty cell marked."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colonnade.engine.schedule.actions import Action, Kind, Table, parse_table
from colonnade.engine.schedule.orders import make_table
from colonnade.engine.schedule.replay import Milestone, check, live_counts, milestone, needed, num_stages, replay
from colonnade.errors import ScheduleError
from tests.engine.schedule.tables import torch_table, valid_tables


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


# -- the checker ---
TORCH_TABLES = {
    "ScheduleGPipe": 1,
    "ScheduleInterleaved1F1B": 2,
    "ScheduleLoopedBFS": 2,
    "ScheduleInterleavedZeroBubble": 2,
    "ScheduleZBVZeroBubble": 2,
    "ScheduleDualPipeV": 2,
}


def can_end(table: Table) -> bool:
    """The slow, plain truth about deadlock: let any rank that can take a step take it, until none can."""
    last = num_stages(table) - 1
    position = dict.fromkeys(table, 0)
    done = set()
    moved = True
    while moved:
        moved = False
        for rank, actions in table.items():
            if position[rank] < len(actions) and set(needed(actions[position[rank]], last)) <= done:
                done.add(milestone(actions[position[rank]]))
                position[rank] += 1
                moved = True
    return all(position[rank] == len(actions) for rank, actions in table.items())


@given(valid_tables())
def test_every_valid_table_passes(table: Table) -> None:
    facts = check(table)
    assert facts.num_ranks == len(table)
    assert facts.num_stages == num_stages(table)
    for stage, rank in enumerate(facts.stage_ranks):
        assert any(action.stage == stage for action in table[rank])
    assert check(table, num_microbatches=facts.num_microbatches) == facts


@given(valid_tables(), st.randoms(use_true_random=False), st.sampled_from(["drop", "again", "move", "renumber"]))
def test_a_table_with_one_wrong_action_is_stopped(table: Table, random: Random, fault: str) -> None:
    facts = check(table)
    rank = random.choice([rank for rank in table if table[rank]])
    column = random.randrange(len(table[rank]))
    action = table[rank][column]
    if fault == "drop":
        del table[rank][column]
    elif fault == "again":
        table[rank].append(action)
    elif fault == "move":
        other = (rank + 1) % (len(table) + 1)
        table[other] = [*table.get(other, []), table[rank].pop()]
    else:
        table[rank][column] = action._replace(micro_batch=facts.num_microbatches)
    with pytest.raises(ScheduleError):
        check(table, num_microbatches=facts.num_microbatches)


@given(valid_tables(), st.randoms(use_true_random=False))
def test_rows_in_any_order_pass_if_and_only_if_they_can_run(table: Table, random: Random) -> None:
    for actions in table.values():
        random.shuffle(actions)
    try:
        check(table)
        passed = True
    except ScheduleError:
        passed = False
    assert passed == can_end(table)


@pytest.mark.parametrize("name", TORCH_TABLES)
def test_torchs_tables_pass(name: str) -> None:
    facts = check(torch_table(name, 4, 8, TORCH_TABLES[name]), num_microbatches=8)
    assert facts.num_stages == 4 * TORCH_TABLES[name]


@pytest.mark.skipif(torch.__version__ < "2.13", reason="the 1F1B table of torch came in 2.13")
@pytest.mark.parametrize("shape", [(2, 4), (4, 8), (8, 16)])
def test_torchs_own_1f1b_table_is_rejected(shape: tuple[int, int]) -> None:
    table = torch_table("Schedule1F1B", *shape)
    with pytest.raises(ScheduleError, match=rf"no micro-batch {shape[1]}: they are 0..{shape[1] - 1}"):
        check(table, num_microbatches=shape[1])
    with pytest.raises(ScheduleError, match="is missing on rank"):
        check(table)


def message_of(rows: list[str], **limits: object) -> str:
    with pytest.raises(ScheduleError) as caught:
        check(parse_table(rows), **limits)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize(
    ("rows", "said", "marked"),
    [
        (["0F0", "1F0 1B0"], "0B0 (or 0I0 and 0W0) is missing on rank 0", ">end<"),
        (["0F0 0I0", "1F0 1B0"], "0W0 is missing", ">end<"),
        (["0F0 0W0", "1F0 1B0"], "0I0 is missing", ">end<"),
        (["0B0", "1F0 1B0"], "0F0 is missing", ">end<"),
        (["0F0 0F0 0B0", "1F0 1B0"], "0F0 comes after 0F0", ">0F0<"),
        (["0F0 0I0 0W0 0B0", "1F0 1B0"], "0B0 comes after 0I0", ">0B0<"),
        (["0F0 0B0 0W0", "1F0 1B0"], "0W0 comes after 0B0", ">0W0<"),
        (["0F0 0B0", "1B0 1F0"], "1B0 is before 1F0", ">1B0<"),
        (["0F0 0W0 0I0", "1F0 1B0"], "0W0 is before 0I0", ">0W0<"),
        (["0F0 0B0", "1F0 1B0 0F1"], "stage 0 is on rank 0, but 0F1 is on rank 1", ">0F1<"),
        (["0F0 0B0", "2F0 2B0"], "1F0 is missing on rank 0", ">end<"),
        (["0F0 0SEND_F0 0B0", "1F0 1B0"], "0SEND_F0 is a transfer", ">0SEND_F0<"),
    ],
)
def test_each_fault_is_told_and_marked(rows: list[str], said: str, marked: str) -> None:
    message = message_of(rows)
    assert said in message
    assert marked in message
    assert message.count("\n") == len(rows), "the grid has a line for every rank"


def test_a_deadlock_names_every_rank_that_waits() -> None:
    message = message_of(["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"])
    assert "deadlock" in message
    assert "rank 0 at 0B0 waits for the input gradient of stage 1 for micro-batch 0" in message
    assert "rank 1 at 1F1 waits for the output of stage 0 for micro-batch 1" in message
    assert ">0B0<" in message
    assert ">1F1<" in message


def test_every_rank_has_a_stage_and_every_micro_batch_its_actions() -> None:
    for rows in (["0F0 0B0", ""], ["0F0 0B0", "", "1F0 1B0"]):
        assert "rank 1 has no actions" in message_of(rows)
    assert "0F1 is missing" in message_of(["0F0 0B0", "1F0 1B0"], num_microbatches=2)


def test_an_empty_table_is_refused() -> None:
    with pytest.raises(ScheduleError, match="is empty"):
        check({0: [], 1: []})


def test_the_grid_of_a_long_table_shows_the_fault_and_its_surroundings() -> None:
    table = make_table("1f1b", 32, 64)
    table[20].remove(Action(20, Kind.BACKWARD, 40))
    with pytest.raises(ScheduleError) as caught:
        check(table)
    lines = str(caught.value).splitlines()
    assert len(lines) < 20
    assert all(len(line) < 160 for line in lines)
    assert ">end<" in str(caught.value)

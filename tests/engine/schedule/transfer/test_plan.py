"""Transfers are complete, in one order on both sides, and cannot lock up even where every transfer blocks."""

from __future__ import annotations

from hypothesis import given

from colonnade.engine.schedule.actions import COMPUTE, Action, Kind, Table, format_rows, only_forward, parse_table
from colonnade.engine.schedule.orders import chunks_of, make_table
from colonnade.engine.schedule.replay import add_transfers, check, confirmation, peer_stage, receive_early
from colonnade.registry import ORDERS
from tests.engine.schedule.tables import valid_tables

RECEIVES = {Kind.SEND_FORWARD: Kind.RECEIVE_FORWARD, Kind.SEND_BACKWARD: Kind.RECEIVE_BACKWARD}


def runs_with_blocking_transfers(program: Table) -> bool:
    """Run with transfers that block both sides until both are there, as the strictest backend would.

    A SENT action blocks until the receiver has passed the compute action that uses what was sent.
    """
    position = dict.fromkeys(program, 0)
    passed: set[Action] = set()

    def current(rank: int) -> Action | None:
        return program[rank][position[rank]] if position[rank] < len(program[rank]) else None

    def advance(rank: int) -> None:
        action = current(rank)
        assert action is not None
        passed.add(action)
        position[rank] += 1

    moved = True
    while moved:
        moved = False
        for rank in program:
            action = current(rank)
            if action is None:
                continue
            if action.kind in RECEIVES:
                other = Action(peer_stage(action), RECEIVES[action.kind], action.micro_batch)
                partner = next((peer for peer in program if current(peer) == other), None)
                if partner is not None:
                    advance(rank)
                    advance(partner)
                    moved = True
            elif action.kind in RECEIVES.values():
                continue
            elif action.kind in (Kind.SENT_FORWARD, Kind.SENT_BACKWARD):
                kinds = [Kind.FORWARD] if action.kind is Kind.SENT_FORWARD else [Kind.BACKWARD, Kind.INPUT]
                if any(Action(peer_stage(action), kind, action.micro_batch) in passed for kind in kinds):
                    advance(rank)
                    moved = True
            else:
                advance(rank)
                moved = True
    return all(current(rank) is None for rank in program)


def check_program(table: Table) -> None:
    program = add_transfers(table)
    assert {rank: [a for a in actions if a.kind in COMPUTE] for rank, actions in program.items()} == table
    assert runs_with_blocking_transfers(program)
    home = {action.stage: rank for rank, actions in table.items() for action in actions}
    for rank, actions in program.items():
        arrived = {(action.stage, action.kind, action.micro_batch) for action in actions}
        for action in actions:
            crosses_down = action.stage > 0 and home[action.stage - 1] != rank
            if action.kind is Kind.FORWARD and crosses_down:
                assert (action.stage, Kind.RECEIVE_FORWARD, action.micro_batch) in arrived
            if action.kind in (Kind.BACKWARD, Kind.INPUT) and crosses_down:
                assert (action.stage, Kind.SEND_BACKWARD, action.micro_batch) in arrived
                assert (action.stage, Kind.SENT_BACKWARD, action.micro_batch) in arrived


@given(valid_tables())
def test_any_valid_table_and_its_evaluation_run_with_blocking_transfers_and_early_receives_keep_other_orders(
    table: Table,
) -> None:
    """In one test: to make the tables takes longest."""
    check_program(table)
    evaluation = add_transfers(only_forward(table))
    assert runs_with_blocking_transfers(evaluation)
    ends = confirmation(table)
    assert runs_with_blocking_transfers({rank: actions + ends[rank] for rank, actions in evaluation.items()})
    check_early_receives(table)


def test_named_orders() -> None:
    for name in ORDERS:
        table = make_table(name, 4, 8, chunks_of(name) or 2)
        check(table)
        check_program(table)


def test_letter_by_letter() -> None:
    assert format_rows(add_transfers(parse_table(["0F0 0B0", "1F0 1B0"]))) == [
        "0F0 0SEND_F0 0SENT_F0 0RECV_B0 0B0",
        "1RECV_F0 1F0 1B0 1SEND_B0 1SENT_B0",
    ]


def test_stages_of_one_rank_hand_over_without_transfers() -> None:
    rows = ["0F0 1F0 1B0 0B0"]
    assert format_rows(add_transfers(parse_table(rows))) == rows


def test_early_receives_letter_by_letter() -> None:
    """One compute action sooner, never before the start."""
    rows = add_transfers(parse_table(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]))
    assert format_rows({rank: receive_early(actions) for rank, actions in rows.items()}) == [
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0SENT_F0 0SENT_F1 0RECV_B1 0B0 0B1",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1SENT_B0 1B1 1SEND_B1 1SENT_B1",
    ]


def check_early_receives(table: Table) -> None:
    receives = set(RECEIVES.values())
    for actions in add_transfers(table).values():
        early = receive_early(actions)
        for kinds in (receives, set(Kind) - receives):
            assert [a for a in early if a.kind in kinds] == [a for a in actions if a.kind in kinds]
        moved = [early.index(a) - actions.index(a) for a in actions if a.kind in receives]
        assert all(places <= 0 for places in moved)


def test_a_confirmation_letter_by_letter() -> None:
    """From the last stage to the first, but not between stages of one rank."""
    three = confirmation(parse_table(["0F0 0B0", "1F0 1B0", "2F0 2B0"]))
    assert [[str(action) for action in three[rank]] for rank in range(3)] == [
        ["0RECV_B-1"],
        ["1RECV_B-1", "1SEND_B-1"],
        ["2SEND_B-1"],
    ]
    rows = ["0F0 0B0", "1F0 2F0 2B0 1B0", "3F0 3B0"]
    told = confirmation(parse_table(rows))
    assert {rank: [(action.stage, action.kind, action.micro_batch) for action in told[rank]] for rank in told} == {
        0: [(0, Kind.RECEIVE_BACKWARD, -1)],
        1: [(2, Kind.RECEIVE_BACKWARD, -1), (1, Kind.SEND_BACKWARD, -1)],
        2: [(3, Kind.SEND_BACKWARD, -1)],
    }

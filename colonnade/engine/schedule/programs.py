"""Programs: a table of compute actions with the transfers that it needs, added here. Integers only, no process groups.

All ranks work out the same total order of everything, compute and transfers, from the same replay, and each
runs its own part of it in that order. A transfer has one place in the total order, on both sides. So the
earliest thing that is not done can always be done, even where a send blocks until its receive is there and
where a pair of ranks has one channel for both directions (NCCL): no valid table can lock up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from colonnade.engine.schedule.actions import COMPUTE, GIVES_INPUT_GRADIENT, Action, Kind, Table
from colonnade.engine.schedule.replay import num_stages, replay

CONFIRMS = -1
"""In place of the number of a micro-batch."""
_FORWARD = (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD, Kind.SENT_FORWARD)
_BACKWARD = (Kind.SEND_BACKWARD, Kind.RECEIVE_BACKWARD, Kind.SENT_BACKWARD)


def add_transfers(table: Table) -> Table:
    """The table with every send, receive and end of a send in its place; the table must have been checked.

    Neighbouring stages on one rank hand tensors over without a transfer. The same table gives the same
    program on every rank.
    """
    home = {action.stage: rank for rank, actions in table.items() for action in actions}
    last_stage = num_stages(table) - 1
    program: Table = {rank: [] for rank in table}
    for rank, action in _total_order(table):
        program[rank].append(action)
        for transfer in _transfers_after(action, last_stage):
            if home[transfer.stage] != home[peer_stage(transfer)]:
                program[home[transfer.stage]].append(transfer)
    return program


def confirmation(table: Table) -> Table:
    """What may follow an evaluation: empty messages from the last stage to the first.

    So a rank that only sends hears in the same step whether one after it has failed.
    """
    home = {action.stage: rank for rank, actions in table.items() for action in actions}
    program: Table = {rank: [] for rank in table}
    for stage in reversed(range(1, num_stages(table))):
        if home[stage] != home[stage - 1]:
            program[home[stage]].append(Action(stage, Kind.SEND_BACKWARD, CONFIRMS))
            program[home[stage - 1]].append(Action(stage - 1, Kind.RECEIVE_BACKWARD, CONFIRMS))
    return program


def receive_early(actions: Sequence[Action]) -> list[Action]:
    """The program of one rank with every receive begun one compute action sooner.

    So its memory is ready before it is sent, and it comes while this rank computes. Only for backends on which a
    receive that waits holds up nothing else (gloo): elsewhere both sides must keep the one order.
    """
    ahead: list[Action] = []
    after: list[Action] = []  # the last compute action and what follows it
    for action in actions:
        if action.kind in (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD):
            ahead.append(action)
            continue
        if action.kind in COMPUTE:
            ahead += after
            after = []
        after.append(action)
    return ahead + after


def peer_stage(transfer: Action) -> int:
    """The stage at the other end of a transfer."""
    to_next = (Kind.SEND_FORWARD, Kind.SENT_FORWARD, Kind.RECEIVE_BACKWARD)
    return transfer.stage + (1 if transfer.kind in to_next else -1)


def _total_order(table: Table) -> list[tuple[int, Action]]:
    rows = replay(table, cost=lambda action: 2.0 if action.kind is Kind.BACKWARD else 1.0).rows
    events = [(timed.end, rank, timed.action) for rank, row in rows.items() for timed in row]
    return [(rank, action) for _, rank, action in sorted(events)]


def _transfers_after(action: Action, last_stage: int) -> Iterator[Action]:
    """What happens when `action` is done: the send that it used is over, and what it gives is sent and received."""
    stage, kind, micro_batch = action
    if kind is Kind.FORWARD:
        send, receive, sent, before, after = *_FORWARD, stage - 1, stage + 1
    elif kind in GIVES_INPUT_GRADIENT:
        send, receive, sent, before, after = *_BACKWARD, stage + 1, stage - 1
    else:
        return
    if 0 <= before <= last_stage:
        yield Action(before, sent, micro_batch)
    if 0 <= after <= last_stage:
        yield Action(stage, send, micro_batch)
        yield Action(after, receive, micro_batch)

"""Programs: the compute actions of a table together with the sends and receives that they need. Plain data, no process groups.

All ranks derive the same total order of compute actions and transfers from one replay, and each runs its own part in that order. A
transfer has one place in the total order, on both sides. So the earliest action that is not done can always run, even if a send
blocks until its receive is posted and both directions share one queue (NCCL): a valid table cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence

from colonnade.engine.schedule.actions import COMPUTE, GIVES_INPUT_GRADIENT, Action, Kind, Table
from colonnade.engine.schedule.replay import num_stages, replay

CONFIRMS = -1
"""The micro-batch number of a confirmation (see `confirmation`)."""
_FORWARD = (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD, Kind.SENT_FORWARD)
_BACKWARD = (Kind.SEND_BACKWARD, Kind.RECEIVE_BACKWARD, Kind.SENT_BACKWARD)


def add_transfers(table: Table) -> Table:
    """The table with every send, receive and end of a send in its place; the same on every rank.

    The table must have been checked. Neighbouring stages on one rank need no transfer.
    """
    home = {action.stage: rank for rank, actions in table.items() for action in actions}
    last_stage = num_stages(table) - 1
    program: Table = {rank: [] for rank in table}
    # The end times of a replay, with ties broken by rank, are a total order that every rank can compute.
    rows = replay(table, cost=lambda action: 2.0 if action.kind is Kind.BACKWARD else 1.0).rows
    events = sorted((timed.end, rank, timed.action) for rank, row in rows.items() for timed in row)
    for _, rank, action in events:
        program[rank].append(action)
        stage, kind, micro_batch = action
        if kind is Kind.FORWARD:
            send, receive, sent, before, after = *_FORWARD, stage - 1, stage + 1
        elif kind in GIVES_INPUT_GRADIENT:
            send, receive, sent, before, after = *_BACKWARD, stage + 1, stage - 1
        else:
            continue
        # The value that the action used has arrived, and its result is sent and received.
        transfers = []
        if 0 <= before <= last_stage:
            transfers.append(Action(before, sent, micro_batch))
        if 0 <= after <= last_stage:
            transfers += [Action(stage, send, micro_batch), Action(after, receive, micro_batch)]
        for transfer in transfers:
            if home[transfer.stage] != home[peer_stage(transfer)]:
                program[home[transfer.stage]].append(transfer)
    return program


def confirmation(table: Table) -> Table:
    """Empty messages from the last stage to the first, which may follow an evaluation.

    Without them a rank that only sends would not learn in the same step that a later one has failed.
    """
    home = {action.stage: rank for rank, actions in table.items() for action in actions}
    program: Table = {rank: [] for rank in table}
    for stage in reversed(range(1, num_stages(table))):
        if home[stage] != home[stage - 1]:
            program[home[stage]].append(Action(stage, Kind.SEND_BACKWARD, CONFIRMS))
            program[home[stage - 1]].append(Action(stage - 1, Kind.RECEIVE_BACKWARD, CONFIRMS))
    return program


def receive_early(actions: Sequence[Action]) -> list[Action]:
    """The program of one rank with every receive moved one compute action earlier.

    Its memory is then ready before it is sent, and it arrives while this rank computes. Only for backends in which a
    pending receive delays nothing else (gloo); over a queue (NCCL) both sides must keep the one order.
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

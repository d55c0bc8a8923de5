"""Zero-bubble orders: backward in two parts, so that weight gradients fill what would be waiting time.

From the ideas of "Zero Bubble Pipeline Parallelism" and "Pipeline Parallelism with Controllable Memory" (Qi
et al.) and of DualPipe (DeepSeek-AI). All are for equal costs of F, I and W.
"""

from __future__ import annotations

from collections import Counter, deque

from colonnade.engine.schedule.actions import Action, Kind, Table
from colonnade.engine.schedule.replay import Milestone, milestone, needed, num_stages
from colonnade.errors import ScheduleError


def fill_weights(table: Table, limit: int) -> Table:
    """Add a W for every I of a table of F and I: where its rank would wait, or pass `limit` live chunks.

    One tick per action. A rank's F and I keep their order.
    """
    last_stage = num_stages(table) - 1
    todo = {rank: deque(actions) for rank, actions in table.items()}
    owed: dict[int, deque[Action]] = {rank: deque() for rank in table}
    live = Counter[int]()
    filled: Table = {rank: [] for rank in table}
    done: set[Milestone] = set()
    while any(todo.values()) or any(owed.values()):
        reached: list[Milestone] = []
        for rank in table:
            action = _next(todo[rank], owed[rank], done, last_stage, full=live[rank] >= limit)
            if action is None:
                continue
            filled[rank].append(action)
            live[rank] += (action.kind is Kind.FORWARD) - (action.kind is Kind.WEIGHT)
            if action.kind is Kind.INPUT:
                owed[rank].append(action._replace(kind=Kind.WEIGHT))
            reached += [there for there in [milestone(action)] if there is not None]
        done.update(reached)
    return filled


def _next(todo: deque[Action], owed: deque[Action], done: set[Milestone], last_stage: int, full: bool) -> Action | None:
    """The action a rank takes in this tick: its next one, or an owed W where that must or had better wait."""
    if todo:
        must_free = full and bool(owed) and todo[0].kind is Kind.FORWARD
        if not must_free and all(need in done for need in needed(todo[0], last_stage)):
            return todo.popleft()
    return owed.popleft() if owed else None


class _VRow:
    """The row of one rank of a V, written action by action; chunk 0 goes down the ranks, 1 comes back."""

    def __init__(self, rank: int, num_ranks: int, num_micro_batches: int) -> None:
        self.actions: list[Action] = []
        self._stages = (rank, 2 * num_ranks - 1 - rank)
        self._num_micro_batches = num_micro_batches
        self._count = Counter[tuple[int, Kind]]()
        self._owed: deque[Action] = deque()

    def forward(self, chunk: int) -> None:
        """The next forward pass of the chunk, if one is left."""
        self._add(chunk, Kind.FORWARD, self._num_micro_batches)

    def input(self, chunk: int) -> None:
        """The next input gradient of the chunk, if its forward pass is there; its W is owed from now on."""
        if self._add(chunk, Kind.INPUT, self._count[chunk, Kind.FORWARD]):
            self._owed.append(self.actions[-1]._replace(kind=Kind.WEIGHT))

    def weight(self) -> None:
        """The oldest W owed."""
        self.actions.append(self._owed.popleft())

    def backward(self, chunk: int) -> None:
        """The next backward pass of the chunk as one action."""
        if self._add(chunk, Kind.INPUT, self._count[chunk, Kind.FORWARD]):
            self.actions[-1] = self.actions[-1]._replace(kind=Kind.BACKWARD)

    def left(self, chunk: int) -> int:
        """How many micro-batches of the chunk still lack an input gradient."""
        return self._num_micro_batches - self._count[chunk, Kind.INPUT]

    def _add(self, chunk: int, kind: Kind, end: int) -> bool:
        index = self._count[chunk, kind]
        if index >= end:
            return False
        self._count[chunk, kind] += 1
        self.actions.append(Action(self._stages[chunk], kind, index))
        return True


def zb_v(num_ranks: int, num_micro_batches: int) -> Table:
    """Zero bubble on a V, with the memory of 1F1B.

    From m >= p on, a step takes p - 1 ticks more than its work, the least for any order that starts at one
    end; from m >= 2p - 1 on, no rank waits between its first action and its last.
    """
    table: Table = {}
    for rank in range(num_ranks):
        row = _VRow(rank, num_ranks, num_micro_batches)
        for _ in range(2 * (num_ranks - rank) - 1):
            row.forward(0)
        for _ in range(rank):
            row.forward(1)
            row.forward(0)
        for _ in range(num_ranks - rank):
            row.forward(1)
            row.input(1)
        while row.left(0) or row.left(1):
            row.forward(0)
            row.input(0)
            row.forward(1)
            row.input(1)
        table[rank] = row.actions
    return fill_weights(table, limit=2 * num_ranks)


def dualpipe_v(num_ranks: int, num_micro_batches: int) -> Table:
    """DualPipe on a V: in the middle every forward pass stands beside the backward pass of the other chunk.

    The pairs are there to hide communication inside the layers; here they run one after the other. Needs two
    micro-batches per rank to fill the middle.
    """
    if num_micro_batches < 2 * num_ranks:
        raise ScheduleError(
            f"dualpipe_v on {num_ranks} ranks needs at least {2 * num_ranks} micro-batches, not "
            f"{num_micro_batches}. Raise num_microbatches, or use order='zb_v', which takes any number."
        )
    return {rank: _dualpipe_row(rank, num_ranks, num_micro_batches).actions for rank in range(num_ranks)}


def _dualpipe_row(rank: int, num_ranks: int, num_micro_batches: int) -> _VRow:
    row = _VRow(rank, num_ranks, num_micro_batches)
    below = num_ranks - rank - 1
    for _ in range(2 * below):
        row.forward(0)
    for _ in range(rank + 1):
        row.forward(0)
        row.forward(1)
    for _ in range(below):
        row.input(1)
        row.weight()
        row.forward(1)
    for _ in range(num_micro_batches - 2 * num_ranks + rank + 1):
        row.forward(0)
        row.backward(1)
        row.forward(1)
        row.backward(0)
    for _ in range(below):
        row.backward(1)
        row.forward(1)
        row.backward(0)
    # From half-way through the drain on, ranks wait for each other: the weight gradients are kept for then.
    for step in range(2 * (rank + 1)):
        (row.backward if step <= rank else row.input)(1 - step % 2)
    for _ in range(below):
        row.weight()
        row.input(0)
    for _ in range(rank + 1):
        row.weight()
    return row

"""Checks a table of actions before it runs: is it complete, consistent and free of deadlocks?

Each stage is on one rank; F comes before B or I, I before W; each micro-batch passes each stage once. Built-in orders are checked
like custom ones. An error shows the grid with the faulty cell marked.
"""

from __future__ import annotations

from dataclasses import dataclass

from colonnade.engine.schedule.actions import COMPUTE, Action, Kind, Table
from colonnade.engine.schedule.replay import replay
from colonnade.errors import ScheduleError

_COLUMNS_SHOWN = 8
"""Cells of the grid shown on each side of a fault."""
_ROWS_SHOWN = 16
_NEEDED_BEFORE = {Kind.BACKWARD: Kind.FORWARD, Kind.INPUT: Kind.FORWARD, Kind.WEIGHT: Kind.INPUT}
"""By kind of a backward action: the kind that must come before it on the same rank."""
_EXCLUDED_BY = {Kind.BACKWARD: (Kind.INPUT, Kind.WEIGHT), Kind.INPUT: (Kind.BACKWARD,), Kind.WEIGHT: (Kind.BACKWARD,)}
"""By kind: other kinds that a row must not contain for the same stage and micro-batch."""


@dataclass(frozen=True)
class Facts:
    """The sizes of a checked table."""

    num_ranks: int
    num_stages: int
    num_microbatches: int
    stage_ranks: tuple[int, ...]
    """The pipeline rank of each stage."""

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a pipeline rank, in order."""
        return [stage for stage, home in enumerate(self.stage_ranks) if home == rank]


def check(table: Table, *, num_microbatches: int | None = None) -> Facts:
    """Check that `table` can run.

    Args:
        table: The table.
        num_microbatches: The expected number; default: as many as the table has.

    Raises:
        ScheduleError: If it cannot run; the message shows where.
    """
    if not any(table.values()):
        raise ScheduleError(
            "this table of actions is empty: each rank needs at least one F and its backward", code="C051"
        )
    actions = [action for row in table.values() for action in row]
    count = num_microbatches or 1 + max(action.micro_batch for action in actions)
    homes = {action.stage: rank for rank in reversed(list(table)) for action in table[rank]}
    stage_ranks = tuple(homes.get(stage, 0) for stage in range(max(homes) + 1))

    # Each cell: a compute action of a stage of this rank and of an existing micro-batch, not a duplicate.
    for rank, row in table.items():
        if not row:
            raise _fault(table, {rank: 0}, f"rank {rank} has no actions, but each rank has at least one stage")
        seen: set[Action] = set()
        for column, action in enumerate(row):
            problem = None
            if action.kind not in COMPUTE:
                problem = f"{action} is a transfer; the library adds these. Leave only F, B, I and W."
            elif (home := stage_ranks[action.stage]) != rank:
                problem = f"stage {action.stage} is on rank {home}, but {action} is on rank {rank}"
            elif action.micro_batch >= count:
                problem = f"there is no micro-batch {action.micro_batch}: they are 0..{count - 1}"
            else:
                kinds = (action.kind, *_EXCLUDED_BY.get(action.kind, ()))
                clash = next((other for kind in kinds if (other := action._replace(kind=kind)) in seen), None)
                problem = f"{action} comes after {clash}: remove one of the two" if clash else None
            if problem:
                raise _fault(table, {rank: column}, problem)
            seen.add(action)

    # Each micro-batch on each stage: one F, and either B, or I and W.
    for stage, rank in enumerate(stage_ranks):
        row_set = set(table[rank])
        for micro_batch in range(count):
            missing = _missing(row_set, stage, micro_batch)
            if missing:
                raise _fault(table, {rank: len(table[rank])}, f"{missing} is missing on rank {rank}")

    for rank, row in table.items():
        columns = {action: column for column, action in enumerate(row)}
        for action, column in columns.items():
            earlier = action._replace(kind=_NEEDED_BEFORE.get(action.kind, action.kind))
            if columns[earlier] > column:
                raise _fault(table, {rank: column}, f"{action} is before {earlier}, which it needs")

    # No ring of ranks that wait for each other: a replay gets to the end.
    run = replay(table, cost=lambda action: 1.0)
    if run.stuck:
        marks = {rank: len(run.rows[rank]) for rank in sorted(run.stuck)}
        waits = "; ".join(
            f"rank {rank} at {table[rank][column]} waits for {run.stuck[rank]}" for rank, column in marks.items()
        )
        raise _fault(table, marks, f"deadlock: {waits}")
    return Facts(len(table), len(stage_ranks), count, stage_ranks)


def grid(table: Table, marks: dict[int, int]) -> str:
    """The table as text, around the marked cells. `marks`: the column of each marked rank."""
    first = max(0, min(marks.values()) - _COLUMNS_SHOWN)
    last = max(marks.values()) + _COLUMNS_SHOWN
    rows = [rank for rank in sorted(table) if rank in marks or abs(rank - min(marks)) <= _ROWS_SHOWN // 2]
    shown = {rank: [f" {action} " for action in table[rank][first : last + 1]] for rank in rows}
    for rank, column in marks.items():
        inside = column - first
        cell = shown[rank][inside].strip() if inside < len(shown[rank]) else "end"
        shown[rank][inside : inside + 1] = [f">{cell}<"]
    width = max((len(cell) for cells in shown.values() for cell in cells), default=0)
    dots = "... " if first else ""
    return "\n".join(
        f"  rank {rank:<3}| {dots}" + "".join(cell.ljust(width) for cell in shown[rank]).rstrip() for rank in rows
    )


def _fault(table: Table, marks: dict[int, int], message: str) -> ScheduleError:
    return ScheduleError(f"this table of actions cannot run: {message}\n{grid(table, marks)}", code="C051")


def _missing(row: set[Action], stage: int, micro_batch: int) -> str:
    """The action that a micro-batch lacks on a stage; empty if it is complete."""
    has = {kind for kind in COMPUTE if Action(stage, kind, micro_batch) in row}
    name = f"{stage}{{}}{micro_batch}".format
    if Kind.FORWARD not in has:
        return name("F")
    if Kind.BACKWARD in has or {Kind.INPUT, Kind.WEIGHT} <= has:
        return ""
    if Kind.INPUT in has:
        return name("W")
    return name("I") if Kind.WEIGHT in has else f"{name('B')} (or {name('I')} and {name('W')})"

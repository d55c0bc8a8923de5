"""Check: every table, ours, torch's or the user's, is proven to run before it runs.

Complete, each stage on one rank, forward before backward, input gradient before weight gradient, no deadlock. A fault is shown in the grid, with its cell marked.
"""

from __future__ import annotations

from dataclasses import dataclass

from colonnade.engine.schedule.actions import COMPUTE, Action, Kind, Table
from colonnade.engine.schedule.replay import replay
from colonnade.errors import ScheduleError

_COLUMNS_SHOWN = 8
"""How many cells of the grid are shown on each side of a fault."""
_ROWS_SHOWN = 16
_NEEDED_BEFORE = {Kind.BACKWARD: Kind.FORWARD, Kind.INPUT: Kind.FORWARD, Kind.WEIGHT: Kind.INPUT}
"""What a backward action needs on its own rank."""
_EXCLUDED_BY = {Kind.BACKWARD: (Kind.INPUT, Kind.WEIGHT), Kind.INPUT: (Kind.BACKWARD,), Kind.WEIGHT: (Kind.BACKWARD,)}
"""What may not stand in a table beside an action, besides the same one again."""


@dataclass(frozen=True)
class Facts:
    """What a checked table is."""

    num_ranks: int
    num_stages: int
    num_microbatches: int
    stage_ranks: tuple[int, ...]
    """The pipeline rank of each stage."""

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a pipeline rank, in order."""
        return [stage for stage, home in enumerate(self.stage_ranks) if home == rank]


def check(table: Table, *, num_microbatches: int | None = None) -> Facts:
    """Prove that `table` can run, or raise a ScheduleError that shows where it cannot.

    `num_microbatches`: how many there will be; else as many as the table speaks of.
    """
    if not any(table.values()):
        raise ScheduleError(
            "this table of actions is empty: each rank needs at least one F and its backward", code="C051"
        )
    actions = [action for row in table.values() for action in row]
    count = num_microbatches or 1 + max(action.micro_batch for action in actions)
    homes = {action.stage: rank for rank in reversed(list(table)) for action in table[rank]}
    stage_ranks = tuple(homes.get(stage, 0) for stage in range(max(homes) + 1))
    for rank in table:
        _check_cells(table, rank, stage_ranks, count)
    for stage, rank in enumerate(stage_ranks):
        _check_complete(table, rank, stage, count)
    for rank, row in table.items():
        columns = {action: column for column, action in enumerate(row)}
        for action, column in columns.items():
            earlier = action._replace(kind=_NEEDED_BEFORE.get(action.kind, action.kind))
            if columns[earlier] > column:
                raise _fault(table, {rank: column}, f"{action} is before {earlier}, which it needs")
    _check_deadlock(table)
    return Facts(len(table), len(stage_ranks), count, stage_ranks)


def grid(table: Table, marks: dict[int, int]) -> str:
    """The table as text around the marked cells: `marks` gives a column for each marked rank."""
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


def _check_cells(table: Table, rank: int, stage_ranks: tuple[int, ...], num_microbatches: int) -> None:
    """Each action of the rank is compute, of a stage of this rank, of a micro-batch there is, and not one too many."""
    if not table[rank]:
        raise _fault(table, {rank: 0}, f"rank {rank} has no actions, but each rank has at least one stage")
    seen: set[Action] = set()
    for column, action in enumerate(table[rank]):
        problem = None
        if action.kind not in COMPUTE:
            problem = f"{action} is a transfer, and those are added by the library. Leave only F, B, I and W."
        elif (home := stage_ranks[action.stage]) != rank:
            problem = f"stage {action.stage} is on rank {home}, but {action} is on rank {rank}"
        elif action.micro_batch >= num_microbatches:
            problem = f"there is no micro-batch {action.micro_batch}: they are 0..{num_microbatches - 1}"
        else:
            kinds = (action.kind, *_EXCLUDED_BY.get(action.kind, ()))
            clash = next((other for kind in kinds if (other := action._replace(kind=kind)) in seen), None)
            problem = f"{action} comes after {clash}: one of the two is too many" if clash else None
        if problem:
            raise _fault(table, {rank: column}, problem)
        seen.add(action)


def _check_complete(table: Table, rank: int, stage: int, num_microbatches: int) -> None:
    """Each micro-batch has one F on the stage, and either one B or one I and one W."""
    row = set(table[rank])
    for micro_batch in range(num_microbatches):
        missing = _missing(row, stage, micro_batch)
        if missing:
            raise _fault(table, {rank: len(table[rank])}, f"{missing} is missing on rank {rank}")


def _missing(row: set[Action], stage: int, micro_batch: int) -> str:
    has = {kind for kind in COMPUTE if Action(stage, kind, micro_batch) in row}
    name = f"{stage}{{}}{micro_batch}".format
    if Kind.FORWARD not in has:
        return name("F")
    if Kind.BACKWARD in has or {Kind.INPUT, Kind.WEIGHT} <= has:
        return ""
    if Kind.INPUT in has:
        return name("W")
    return name("I") if Kind.WEIGHT in has else f"{name('B')} (or {name('I')} and {name('W')})"


def _check_deadlock(table: Table) -> None:
    """Some order in time exists: no ring of ranks that wait for each other."""
    run = replay(table, cost=lambda action: 1.0)
    if run.stuck:
        marks = {rank: len(run.rows[rank]) for rank in sorted(run.stuck)}
        waits = "; ".join(
            f"rank {rank} at {table[rank][column]} waits for {run.stuck[rank]}" for rank, column in marks.items()
        )
        raise _fault(table, marks, f"it comes to a deadlock: {waits}")

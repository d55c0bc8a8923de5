"""Check: every table, ours, torch's or the user's, is proven to run before it runs.

Complete, each stage on one rank, forward before backward, input gradient before weight gradient, no deadlock,
no more memory than allowed. A fault is shown in the grid, with its cell marked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from colonnade.engine.schedule.actions import COMPUTE, Action, Kind, Table
from colonnade.engine.schedule.replay import live_counts, replay
from colonnade.errors import ScheduleError

_COLUMNS_SHOWN = 8
"""How many cells of the grid are shown on each side of a fault."""
_ROWS_SHOWN = 16


@dataclass(frozen=True)
class Facts:
    """What a checked table is."""

    num_ranks: int
    num_stages: int
    num_micro_batches: int
    stage_ranks: tuple[int, ...]
    """The pipeline rank of each stage."""
    peak_live: float
    """The most micro-batches a rank holds at once; each of v chunks counts 1/v."""


def check(
    table: Table,
    *,
    stage_ranks: Sequence[int] | None = None,
    num_micro_batches: int | None = None,
    max_live: float | None = None,
) -> Facts:
    """Prove that `table` can run, or raise a ScheduleError that shows where it cannot.

    `stage_ranks`: the rank that has each stage, where the world is known; else each stage is where its
    actions are. `num_micro_batches`: how many there will be; else as many as the table speaks of.
    `max_live`: refuse a table that holds more micro-batches than this on a rank.
    """
    _check_kinds(table)
    ranks = _check_stages(table, stage_ranks)
    count = _check_micro_batches(table, num_micro_batches)
    _check_complete(table, ranks, count)
    _check_own_order(table)
    _check_deadlock(table)
    peak = _check_live(table, max_live)
    return Facts(len(table), len(ranks), count, tuple(ranks), peak)


def grid(table: Table, marks: dict[int, int]) -> str:
    """The table as text around the marked cells: `marks` gives a column for each marked rank."""
    first = max(0, min(marks.values(), default=0) - _COLUMNS_SHOWN)
    last = max(marks.values(), default=first) + _COLUMNS_SHOWN
    near = min(marks, default=0)
    rows = [rank for rank in sorted(table) if rank in marks or abs(rank - near) <= _ROWS_SHOWN // 2]
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


def _fail(table: Table, marks: dict[int, int], message: str) -> ScheduleError:
    return ScheduleError(f"this table of actions cannot run: {message}\n{grid(table, marks)}")


def _check_kinds(table: Table) -> None:
    if not any(table.values()):
        raise ScheduleError("this table of actions is empty: each rank needs at least one F and its backward")
    for rank, actions in table.items():
        for column, action in enumerate(actions):
            if action.kind not in COMPUTE:
                raise _fail(
                    table,
                    {rank: column},
                    f"{action} is a transfer, and those are added by the library. Leave only F, B, I and W.",
                )


def _check_stages(table: Table, stage_ranks: Sequence[int] | None) -> list[int]:
    """The rank of each stage; every stage has one, and it is the right one where that is known."""
    if stage_ranks is None:
        first = {action.stage: rank for rank in reversed(list(table)) for action in table[rank]}
        stage_ranks = [first.get(stage, 0) for stage in range(max(first) + 1)]
    if len(table) != max(stage_ranks) + 1:
        raise _fail(table, {}, f"it has rows for {len(table)} ranks, but the pipeline has {max(stage_ranks) + 1}")
    for rank, actions in table.items():
        for column, action in enumerate(actions):
            if action.stage >= len(stage_ranks):
                known = f"the stages are 0..{len(stage_ranks) - 1}"
                raise _fail(table, {rank: column}, f"there is no stage {action.stage}: {known}")
            home = stage_ranks[action.stage]
            if home != rank:
                raise _fail(
                    table,
                    {rank: column},
                    f"stage {action.stage} is on rank {home}, but {action} is on rank {rank}",
                )
    return list(stage_ranks)


def _check_micro_batches(table: Table, expected: int | None) -> int:
    highest = max(action.micro_batch for actions in table.values() for action in actions)
    if expected is None:
        return highest + 1
    for rank, actions in table.items():
        for column, action in enumerate(actions):
            if action.micro_batch >= expected:
                raise _fail(
                    table,
                    {rank: column},
                    f"there is no micro-batch {action.micro_batch}: they are 0..{expected - 1}",
                )
    return expected


def _check_complete(table: Table, stage_ranks: Sequence[int], num_micro_batches: int) -> None:
    """Each (stage, micro-batch) has one F, and either one B or one I and one W."""
    for rank, actions in table.items():
        seen: set[Action] = set()
        for column, action in enumerate(actions):
            clash = next((other for other in _excludes(action) if other in seen), None)
            if clash is not None:
                raise _fail(table, {rank: column}, f"{action} comes after {clash}: one of the two is too many")
            seen.add(action)
        for stage in (stage for stage, home in enumerate(stage_ranks) if home == rank):
            for micro_batch in range(num_micro_batches):
                missing = _missing(seen, stage, micro_batch)
                if missing:
                    raise _fail(table, {rank: len(actions)}, f"{missing} is missing on rank {rank}")


def _excludes(action: Action) -> list[Action]:
    """What may not stand in a table beside `action`: itself again, and B beside I or W."""
    others = {
        Kind.BACKWARD: (Kind.INPUT, Kind.WEIGHT),
        Kind.INPUT: (Kind.BACKWARD,),
        Kind.WEIGHT: (Kind.BACKWARD,),
    }
    return [action, *(action._replace(kind=kind) for kind in others.get(action.kind, ()))]


def _missing(seen: set[Action], stage: int, micro_batch: int) -> str:
    has = {kind for kind in COMPUTE if Action(stage, kind, micro_batch) in seen}
    name = f"{stage}{{}}{micro_batch}".format
    if Kind.FORWARD not in has:
        return name("F")
    if Kind.BACKWARD in has or {Kind.INPUT, Kind.WEIGHT} <= has:
        return ""
    if Kind.INPUT in has:
        return name("W")
    return name("I") if Kind.WEIGHT in has else f"{name('B')} (or {name('I')} and {name('W')})"


def _check_own_order(table: Table) -> None:
    """On its own rank, each forward pass is before its backward, and I is before W."""
    before = {Kind.BACKWARD: Kind.FORWARD, Kind.INPUT: Kind.FORWARD, Kind.WEIGHT: Kind.INPUT}
    for rank, actions in table.items():
        seen: set[Action] = set()
        for column, action in enumerate(actions):
            seen.add(action)
            if action.kind in before:
                earlier = action._replace(kind=before[action.kind])
                if earlier not in seen:
                    raise _fail(table, {rank: column}, f"{action} is before {earlier}, which it needs")


def _check_deadlock(table: Table) -> None:
    """Some order in time exists: no ring of ranks that wait for each other."""
    run = replay(table, cost=lambda action: 1.0)
    if run.stuck:
        marks = {rank: len(run.slots[rank]) for rank in sorted(run.stuck)}
        waits = "; ".join(
            f"rank {rank} at {table[rank][column]} waits for {run.stuck[rank]}" for rank, column in marks.items()
        )
        raise _fail(table, marks, f"it comes to a deadlock: {waits}")


def _check_live(table: Table, allowed: float | None) -> float:
    counts = {rank: live_counts(actions) for rank, actions in table.items()}
    for rank, row in counts.items():
        if allowed is not None and max(row, default=0.0) > allowed:
            column = next(column for column, live in enumerate(row) if live > allowed)
            raise _fail(
                table,
                {rank: column},
                f"rank {rank} holds up to {max(row):g} micro-batches at once; {allowed:g} are allowed",
            )
    return max(live for row in counts.values() for live in row)

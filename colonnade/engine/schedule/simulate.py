"""Simulate: when a table's actions run, how much of the time is waiting, how much is held; and a picture.

Costs are given or all equal; nothing is executed and no process group is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from colonnade.engine.schedule.actions import Action, Kind, Table
from colonnade.engine.schedule.check import check
from colonnade.engine.schedule.replay import TimedAction, live_counts, replay
from colonnade.errors import ScheduleError


@dataclass(frozen=True)
class Costs:
    """How long actions take, in any unit. A full backward takes input + weight."""

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    transfer: float = 0.0
    """From the end of an action to the start of the action on another rank that waits for it."""

    def __post_init__(self) -> None:
        if min(self.forward, self.input, self.weight) <= 0 or self.transfer < 0:
            raise ScheduleError(f"costs are above 0 (transfer: not below 0), unlike {self}", code="C051")

    def __call__(self, action: Action) -> float:
        return {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.input + self.weight,
            Kind.INPUT: self.input,
            Kind.WEIGHT: self.weight,
        }[action.kind]


EQUAL_COSTS = Costs()


@dataclass(frozen=True)
class Timeline:
    """Every action of a table with its start and end."""

    rows: dict[int, list[TimedAction]]
    makespan: float
    """From the first start to the last end."""
    bubble: float
    """The pipeline bubble, as of `bubble_of`."""
    peak_live: dict[int, float] = field(repr=False)
    """For each rank, the most micro-batches held at once; each of v chunks counts 1/v."""

    @property
    def max_live(self) -> float:
        """The peak of the rank that holds most."""
        return max(self.peak_live.values())

    def picture(self) -> str:
        """The timeline as text: a row per rank, `F3` a forward pass of micro-batch 3, `.` a wait.

        With several chunks on a rank the stage is written in front: `5F3`.
        """
        tick = min(timed.end - timed.start for row in self.rows.values() for timed in row)
        several = any(len({timed.action.stage for timed in row}) > 1 for row in self.rows.values())
        labels = {
            timed: str(timed.action)[0 if several else len(str(timed.action.stage)) :]
            for row in self.rows.values()
            for timed in row
        }
        width = max(map(len, labels.values())) + 1
        columns = round(self.makespan / tick)
        lines = []
        for rank, row in self.rows.items():
            cells = ["." + " " * (width - 1)] * columns
            for timed in row:
                first, stop = round(timed.start / tick), round(timed.end / tick)
                cells[first:stop] = [labels[timed].ljust(width)] + ["-" * (width - 1) + " "] * (stop - first - 1)
            lines.append(f"rank {rank:<{len(str(len(self.rows)))}} |" + "".join(cells).rstrip())
        return "\n".join(lines)


def bubble_of(rows: Mapping[int, Sequence[TimedAction]]) -> float:
    """The pipeline bubble: the part of ranks x makespan in which ranks wait, 1 - (sum of all passes) / (ranks x makespan)."""
    makespan = max(row[-1].end for row in rows.values())
    work = sum(timed.end - timed.start for row in rows.values() for timed in row)
    return 1 - work / (makespan * len(rows)) if len(rows) > 1 else 0.0  # one rank waits for nobody


def simulate(table: Table, costs: Costs = EQUAL_COSTS) -> Timeline:
    """When each action of a valid table runs; an invalid table is the checker's error."""
    check(table)
    rows = replay(table, costs, costs.transfer).rows
    return Timeline(
        rows=rows,
        makespan=max(row[-1].end for row in rows.values()),
        bubble=bubble_of(rows),
        peak_live={rank: max(live_counts(actions), default=0.0) for rank, actions in table.items()},
    )

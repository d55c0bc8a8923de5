"""Simulates a table: when its actions run, the bubble, the micro-batches held, and a picture.

Costs are given or all equal. No process group is needed.
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
    """Durations of actions, in any unit. A full backward pass takes input + weight."""

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    transfer: float = 0.0
    """From the end of an action until its result is available on another rank."""

    def __post_init__(self) -> None:
        if min(self.forward, self.input, self.weight) <= 0 or self.transfer < 0:
            raise ScheduleError(f"costs must be above 0 (transfer: 0 or more), unlike {self}", code="C051")

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
    """The timed actions of a table."""

    rows: dict[int, list[TimedAction]]
    makespan: float
    """From the first start to the last end."""
    bubble: float
    """The pipeline bubble (see `bubble_of`)."""
    peak_live: dict[int, float] = field(repr=False)
    """For each rank, the maximum of micro-batches held at once; each of v chunks counts 1/v."""

    @property
    def max_live(self) -> float:
        """The highest peak of all ranks."""
        return max(self.peak_live.values())

    def picture(self) -> str:
        """The timeline as text: a row per rank; `F3` is the forward pass of micro-batch 3, `.` a wait.

        With several chunks on a rank the stage comes first: `5F3`.
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
    """The fraction of time in which ranks wait: 1 - (sum of all durations) / (ranks x makespan)."""
    makespan = max(row[-1].end for row in rows.values())
    work = sum(timed.end - timed.start for row in rows.values() for timed in row)
    return 1 - work / (makespan * len(rows)) if len(rows) > 1 else 0.0  # a single rank never waits


def simulate(table: Table, costs: Costs = EQUAL_COSTS) -> Timeline:
    """The timeline of a table. Raises ScheduleError if the table is invalid (see `check`)."""
    check(table)
    rows = replay(table, costs, costs.transfer).rows
    return Timeline(
        rows=rows,
        makespan=max(row[-1].end for row in rows.values()),
        bubble=bubble_of(rows),
        peak_live={rank: max(live_counts(actions), default=0.0) for rank, actions in table.items()},
    )

"""Replay: the one walk over a table that respects what must come before what.

The checker (does it end?), the simulator (when?) and the transfer planner (in which order?) all read this
walk, so they cannot disagree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from colonnade.engine.schedule.actions import ENDS_MICRO_BATCH, GIVES_INPUT_GRADIENT, Action, Kind, Table


class TimedAction(NamedTuple):
    """One action with its start and its end."""

    action: Action
    start: float
    end: float


class Milestone(NamedTuple):
    """A result that others wait for: the output of a forward pass, or the gradient of a stage's inputs."""

    stage: int
    micro_batch: int
    what: str

    def __str__(self) -> str:
        kinds = {"output": "F", "input gradient": "B or I"}
        return f"the {self.what} of stage {self.stage} for micro-batch {self.micro_batch} ({kinds[self.what]})"


@dataclass(frozen=True)
class Replay:
    """What a walk did: the actions of each rank, and for each rank that could not go on, what it waits for."""

    rows: dict[int, list[TimedAction]]
    stuck: dict[int, Milestone]


def milestone(action: Action) -> Milestone | None:
    """What others may wait for once `action` is done; None for a weight gradient."""
    if action.kind is Kind.FORWARD:
        return Milestone(action.stage, action.micro_batch, "output")
    if action.kind in GIVES_INPUT_GRADIENT:
        return Milestone(action.stage, action.micro_batch, "input gradient")
    return None


def needed(action: Action, last_stage: int) -> list[Milestone]:
    """What must be there before `action` can start."""
    stage, kind, micro_batch = action
    if kind is Kind.FORWARD:
        return [Milestone(stage - 1, micro_batch, "output")] if stage > 0 else []
    if kind is Kind.WEIGHT:
        return [Milestone(stage, micro_batch, "input gradient")]
    after = [Milestone(stage + 1, micro_batch, "input gradient")] if stage < last_stage else []
    return [Milestone(stage, micro_batch, "output"), *after]


def replay(table: Table, cost: Callable[[Action], float], transfer: float = 0.0) -> Replay:
    """Run every rank's actions in order, each as soon as its rank is free and its needs are there.

    `cost` gives the duration of an action, `transfer` the time a result takes to another rank. Ranks that
    wait for something that never comes are reported in `stuck`; the walk itself always ends.
    """
    last_stage = num_stages(table) - 1
    done: dict[Milestone, tuple[float, int]] = {}
    waiting: dict[Milestone, list[int]] = defaultdict(list)
    rows: dict[int, list[TimedAction]] = {rank: [] for rank in table}
    stuck: dict[int, Milestone] = {}
    runnable = list(table)
    while runnable:
        rank = runnable.pop()
        stuck.pop(rank, None)
        for action in table[rank][len(rows[rank]) :]:
            needs = needed(action, last_stage)
            missing = next((need for need in needs if need not in done), None)
            if missing is not None:
                waiting[missing].append(rank)
                stuck[rank] = missing
                break
            free = rows[rank][-1].end if rows[rank] else 0.0
            there = [done[need][0] + (transfer if done[need][1] != rank else 0.0) for need in needs]
            start = max([free, *there])
            rows[rank].append(TimedAction(action, start, start + cost(action)))
            reached = milestone(action)
            if reached is not None:
                done[reached] = (rows[rank][-1].end, rank)
                runnable.extend(waiting.pop(reached, ()))
    return Replay(rows, stuck)


def num_stages(table: Table) -> int:
    """How many stages the table speaks of: the highest one plus one."""
    return max((action.stage for actions in table.values() for action in actions), default=-1) + 1


def live_counts(actions: Sequence[Action]) -> list[float]:
    """While each action of a rank runs: of how many whole-model micro-batches the rank holds activations.

    With v chunks on a rank each counts 1/v. A micro-batch is live from its forward pass to the end of its
    last backward action.
    """
    chunks = len({action.stage for action in actions})
    counts, live = [], 0
    for action in actions:
        live += action.kind is Kind.FORWARD
        counts.append(live / chunks)
        live -= action.kind in ENDS_MICRO_BATCH
    return counts

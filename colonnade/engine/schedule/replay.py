"""Replay: walks through a table in an order in which everything that an action needs has happened before it.

The checker (does it end?), the simulator (when?) and the transfers (in which order?) all use this walk, so they cannot
disagree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from colonnade.engine.schedule.actions import ENDS_MICRO_BATCH, GIVES_INPUT_GRADIENT, Action, Kind, Table


class TimedAction(NamedTuple):
    """An action with its start and end time."""

    action: Action
    start: float
    end: float


class Milestone(NamedTuple):
    """A result that other actions need: the output of a forward pass, or the gradient of a stage's inputs."""

    stage: int
    micro_batch: int
    what: str

    def __str__(self) -> str:
        kinds = {"output": "F", "input gradient": "B or I"}
        return f"the {self.what} of stage {self.stage} for micro-batch {self.micro_batch} ({kinds[self.what]})"


@dataclass(frozen=True)
class Replay:
    """The result of a walk: the timed actions of each rank, and the missing milestone of each rank that got stuck."""

    rows: dict[int, list[TimedAction]]
    stuck: dict[int, Milestone]


def milestone(action: Action) -> Milestone | None:
    """The milestone that `action` reaches; None for a weight gradient."""
    if action.kind is Kind.FORWARD:
        return Milestone(action.stage, action.micro_batch, "output")
    if action.kind in GIVES_INPUT_GRADIENT:
        return Milestone(action.stage, action.micro_batch, "input gradient")
    return None


def needed(action: Action, last_stage: int) -> list[Milestone]:
    """The milestones that `action` needs before it can start."""
    stage, kind, micro_batch = action
    if kind is Kind.FORWARD:
        return [Milestone(stage - 1, micro_batch, "output")] if stage > 0 else []
    if kind is Kind.WEIGHT:
        return [Milestone(stage, micro_batch, "input gradient")]
    after = [Milestone(stage + 1, micro_batch, "input gradient")] if stage < last_stage else []
    return [Milestone(stage, micro_batch, "output"), *after]


def replay(table: Table, cost: Callable[[Action], float], transfer: float = 0.0) -> Replay:
    """Run every rank's actions in order, each as soon as its rank is free and its milestones are reached.

    Args:
        table: The table; it need not be valid.
        cost: The duration of an action.
        transfer: The time that a result takes to reach another rank.

    Returns:
        The timed actions. Ranks that wait for a milestone that is never reached are in `stuck`.
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
        # As far as this rank gets; it is queued again when the milestone that it lacks is reached.
        for action in table[rank][len(rows[rank]) :]:
            needs = needed(action, last_stage)
            missing = next((need for need in needs if need not in done), None)
            if missing is not None:
                waiting[missing].append(rank)
                stuck[rank] = missing
                break
            free = rows[rank][-1].end if rows[rank] else 0.0
            arrivals = [done[need][0] + (transfer if done[need][1] != rank else 0.0) for need in needs]
            start = max([free, *arrivals])
            rows[rank].append(TimedAction(action, start, start + cost(action)))
            reached = milestone(action)
            if reached is not None:
                done[reached] = (rows[rank][-1].end, rank)
                runnable.extend(waiting.pop(reached, ()))
    return Replay(rows, stuck)


def num_stages(table: Table) -> int:
    """The number of stages: the highest one in the table plus one."""
    return max((action.stage for actions in table.values() for action in actions), default=-1) + 1


def live_counts(actions: Sequence[Action]) -> list[float]:
    """For each action of a rank: the micro-batches whose activations the rank holds while it runs.

    A micro-batch is held from its forward pass to the end of its last backward action. With v chunks on a rank, each
    counts 1/v.
    """
    chunks = len({action.stage for action in actions})
    counts, live = [], 0
    for action in actions:
        live += action.kind is Kind.FORWARD
        counts.append(live / chunks)
        live -= action.kind in ENDS_MICRO_BATCH
    return counts

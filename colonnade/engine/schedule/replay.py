"""The replay of a table of actions, and its three uses: the check, the simulation, and the transfers.

`replay` visits the actions in an order in which everything that an action needs has happened before the action. The checker (does
the table end?), the simulator (when does an action run?) and the transfers (in which order?) all use `replay`, so they cannot
disagree. Plain data, no process groups.

- `check`: is the table complete, consistent and free of deadlocks? Each stage is on one rank; F comes before B or I, I before W;
  each micro-batch passes each stage once. Built-in orders are checked like custom ones. An error shows the grid with the faulty
  cell marked.
- `simulate`: when the actions run, the bubble, the micro-batches held, and a picture. Costs are given or all equal.
- `add_transfers`: the compute actions with the sends and receives that they need. All ranks derive the same total order of compute
  actions and transfers from one replay, and each runs its own part in that order. A transfer has one place in the total order, on
  both sides. So the earliest action that is not done can always run, even if a send blocks until its receive is posted and both
  directions share one queue (NCCL): a valid table cannot deadlock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from colonnade.engine.schedule.actions import COMPUTE, ENDS_MICRO_BATCH, GIVES_INPUT_GRADIENT, Action, Kind, Table
from colonnade.errors import ScheduleError


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
    """The result of `replay`: the timed actions of each rank, and for each rank that is stuck, the milestone that it waits for."""

    rows: dict[int, list[TimedAction]]
    stuck: dict[int, Milestone]


def milestone(action: Action) -> Milestone | None:
    """The milestone that is reached when `action` ends; None for W, on which no action depends."""
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
    """For each action of a rank, the number of micro-batches whose activations the rank holds while the action runs.

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


_COLUMNS_SHOWN = 8
"""Cells of the grid shown on each side of a fault."""
_ROWS_SHOWN = 16
_NEEDED_BEFORE = {Kind.BACKWARD: Kind.FORWARD, Kind.INPUT: Kind.FORWARD, Kind.WEIGHT: Kind.INPUT}
"""By kind of a backward action: the kind that must come before it on the same rank."""
_EXCLUDED_BY = {Kind.BACKWARD: (Kind.INPUT, Kind.WEIGHT), Kind.INPUT: (Kind.BACKWARD,), Kind.WEIGHT: (Kind.BACKWARD,)}
"""By kind: other kinds that a row must not contain for the same stage and micro-batch."""


@dataclass(frozen=True)
class Facts:
    """The properties of a checked table: its numbers of stages and micro-batches, and the rank of each stage."""

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
        num_microbatches: The expected number of micro-batches; default: the number in the table.

    Raises:
        ScheduleError: If the table cannot run; the message shows the place.
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
    """Format the part of a table around the marked cells as text. `marks`: {rank: column of its marked cell}."""
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


@dataclass(frozen=True)
class Costs:
    """The durations of actions, in any unit. A full backward pass (B) takes `input` + `weight`."""

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    transfer: float = 0.0
    """From the end of an action until its result is available on another rank."""

    def __post_init__(self) -> None:
        if min(self.forward, self.input, self.weight) <= 0 or self.transfer < 0:
            raise ScheduleError(f"costs must be above 0, and transfer must be 0 or more; they are {self}", code="C051")

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
    """The result of `simulate`: the timed actions of a table, the bubble and the held micro-batches."""

    rows: dict[int, list[TimedAction]]
    makespan: float
    """From the first start to the last end."""
    bubble: float
    """The pipeline bubble (see `bubble_of`)."""
    peak_live: dict[int, float] = field(repr=False)
    """For each rank, the maximum of micro-batches held at once; each of v chunks counts 1/v."""

    @property
    def max_live(self) -> float:
        """The largest number of micro-batches that any rank holds at a time."""
        return max(self.peak_live.values())

    def picture(self) -> str:
        """The timeline as text: a row per rank; `F3` is the forward pass of micro-batch 3, `.` a wait.

        With several chunks per rank, the stage is added in front: `5F3`.
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
    """Simulate a table. Raises ScheduleError if the table is invalid (see `check`)."""
    check(table)
    rows = replay(table, costs, costs.transfer).rows
    return Timeline(
        rows=rows,
        makespan=max(row[-1].end for row in rows.values()),
        bubble=bubble_of(rows),
        peak_live={rank: max(live_counts(actions), default=0.0) for rank, actions in table.items()},
    )


CONFIRMS = -1
"""The micro-batch number of a confirmation (see `confirmation`)."""
_FORWARD = (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD, Kind.SENT_FORWARD)
_BACKWARD = (Kind.SEND_BACKWARD, Kind.RECEIVE_BACKWARD, Kind.SENT_BACKWARD)


def add_transfers(table: Table) -> Table:
    """Insert every send, receive and end of a send into a table. The result is the same on every rank.

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
    """An action table for the end of an evaluation: empty messages from the last stage to the first.

    Without these messages, a rank that only sends would not be informed in the same step that a later stage has failed.
    """
    home = {action.stage: rank for rank, actions in table.items() for action in actions}
    program: Table = {rank: [] for rank in table}
    for stage in reversed(range(1, num_stages(table))):
        if home[stage] != home[stage - 1]:
            program[home[stage]].append(Action(stage, Kind.SEND_BACKWARD, CONFIRMS))
            program[home[stage - 1]].append(Action(stage - 1, Kind.RECEIVE_BACKWARD, CONFIRMS))
    return program


def receive_early(actions: Sequence[Action]) -> list[Action]:
    """Move every receive of a rank's program one compute action earlier.

    The memory of the message is then ready before it is sent, and the message arrives while this rank computes. Only for backends
    in which a pending receive does not delay other operations (gloo). Over a queue (NCCL) both sides must keep the same order.
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

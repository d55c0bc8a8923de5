"""Actions and tables: a pipeline schedule as plain data.

An action is one piece of work of one rank: which stage, what kind, which micro-batch. It prints and parses as
`2F0` (stage 2, forward, micro-batch 0). A table gives every pipeline rank its list of actions. Nothing here
needs torch or a process group.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, TypeAlias

from colonnade.errors import ScheduleError, listed
from colonnade.paths import local_path


class Kind(StrEnum):
    """What an action does. Users write the first four; the library adds the transfers."""

    FORWARD = "F"
    BACKWARD = "B"
    """The full backward pass: I and W in one."""
    INPUT = "I"
    """The gradient of the stage's inputs, which the stage before waits for."""
    WEIGHT = "W"
    """The gradient of the stage's parameters, which nobody waits for."""
    SEND_FORWARD = "SEND_F"
    """Start sending the stage's output to the next stage."""
    RECEIVE_FORWARD = "RECV_F"
    """From here on, expect the stage's input from the stage before."""
    SENT_FORWARD = "SENT_F"
    """The next stage has used the output by now: the send is over and its memory may go."""
    SEND_BACKWARD = "SEND_B"
    """Start sending the gradient of the stage's inputs to the stage before."""
    RECEIVE_BACKWARD = "RECV_B"
    """From here on, expect the gradient of the stage's output from the next stage."""
    SENT_BACKWARD = "SENT_B"
    """The stage before has used the gradient by now: the send is over and its memory may go."""


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT})
"""The kinds a user's table may hold."""
GIVES_INPUT_GRADIENT = frozenset({Kind.BACKWARD, Kind.INPUT})
"""After one of these the stage before may run its backward pass."""
ENDS_MICRO_BATCH = frozenset({Kind.BACKWARD, Kind.WEIGHT})
"""After one of these nothing of the micro-batch is kept on the stage."""

_ACTION = re.compile(rf"(\d+)({'|'.join(kind.value for kind in Kind)})(\d+)")
_OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_REDUCE = re.compile(r"\d+REDUCE_GRAD")
_SHARDING = re.compile(r"\d+(UNSHARD|RESHARD)")


class Action(NamedTuple):
    """One piece of work of one rank; prints as `2F0` and parses back."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read `2F0`; anything else is a ScheduleError that shows the form."""
        found = _ACTION.fullmatch(text.strip())
        if found is None:
            raise ScheduleError(
                f"{text!r} is not an action. Write stage, kind, micro-batch, as in 2F0: "
                "F forward, B backward, I input gradient, W weight gradient.",
                code="C051",
            )
        return cls(int(found[1]), Kind(found[2]), int(found[3]))


Table: TypeAlias = "dict[int, list[Action]]"
"""Pipeline rank -> its actions in order."""
Cell: TypeAlias = "Action | str | None"
Row: TypeAlias = "str | Sequence[Cell]"


def parse_table(rows: Mapping[int, Row] | Sequence[Row]) -> Table:
    """Make a table of rows: one per pipeline rank, a string `"0F0 0F1"` or a list of actions, strings, None.

    Empty cells (None, "") are waits, which the executor finds by itself, and are left out. The `pipeline_order` of
    torch.distributed.pipelining may be given unchanged: `(0F1;3B0)OVERLAP_F_B` is F then B, and REDUCE_GRAD needs no
    action, because the engine reduces as soon as gradients are complete. UNSHARD and RESHARD are refused.
    """
    items = rows.items() if isinstance(rows, Mapping) else enumerate(rows)
    table = {rank: _parse_row(row) for rank, row in items}
    if sorted(table) != list(range(len(table))) or not table:
        raise ScheduleError(
            f"a table has one row for each pipeline rank 0..p-1; this one has rows for: {listed(table)}", code="C051"
        )
    return dict(sorted(table.items()))


def read_csv(path: str | Path) -> Table:
    """Read a table from a CSV file: line r has the actions of pipeline rank r, empty cells are waits. Errors name the file."""
    file_path = local_path(path, "the table of actions", ScheduleError)
    try:
        with file_path.open(encoding="utf-8", newline="") as file:
            return parse_table([row for row in csv.reader(file) if row])
    except OSError as error:
        raise ScheduleError(f"the table of actions {str(path)!r} cannot be read: {error}", code="C051") from error
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}", code="C051") from error


def format_rows(table: Table) -> list[str]:
    """One string per rank, `"0F0 0F1 0B0"`; `parse_table` reads it back."""
    return [" ".join(map(str, table[rank])) for rank in sorted(table)]


def only_forward(table: Table) -> Table:
    """The table without backward work, for evaluation; the order of the forward passes stays."""
    return {rank: [action for action in actions if action.kind is Kind.FORWARD] for rank, actions in table.items()}


def _parse_row(row: Row) -> list[Action]:
    cells: Iterable[Cell] = re.split(r"[,\s]+", row) if isinstance(row, str) else row
    return [action for cell in cells for action in _parse_cell(cell)]


def _parse_cell(cell: object) -> list[Action]:
    if isinstance(cell, Action):
        return [cell]
    text = "" if cell is None else str(cell).strip()
    overlapped = _OVERLAPPED.fullmatch(text)
    if overlapped:
        return [Action.parse(part) for part in overlapped[1].split(";")]
    if _SHARDING.fullmatch(text):
        raise ScheduleError(
            f"{text} cannot be done by a table: zero stage 3 (FSDP2) gathers and frees parameters pass by pass. "
            "Leave out UNSHARD and RESHARD.",
            code="C051",
        )
    return [Action.parse(text)] if text and not _REDUCE.fullmatch(text) else []

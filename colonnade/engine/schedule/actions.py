"""Actions and tables: a pipeline schedule as plain data, without torch or a process group.

An action is one piece of work of one rank, given by a stage, a kind of work and a micro-batch. Actions print and parse as `2F0`
(stage 2, forward, micro-batch 0). A table lists the actions of every pipeline rank. Compare `_Action` and `pipeline_order` of
torch.distributed.pipelining.
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
    """The kind of work of an action. Tables contain only the first four kinds; `replay.add_transfers` adds sends and receives."""

    FORWARD = "F"
    BACKWARD = "B"
    """The full backward pass: I and W together."""
    INPUT = "I"
    """The gradient of the stage's inputs, for which the previous stage waits."""
    WEIGHT = "W"
    """The gradient of the stage's parameters, for which no other stage waits."""
    SEND_FORWARD = "SEND_F"
    """Start sending the stage's output to the next stage."""
    RECEIVE_FORWARD = "RECV_F"
    """From here on, expect the stage's input from the previous stage."""
    SENT_FORWARD = "SENT_F"
    """The next stage has used the output by now: end the send and release its memory."""
    SEND_BACKWARD = "SEND_B"
    """Start sending the gradient of the stage's inputs to the previous stage."""
    RECEIVE_BACKWARD = "RECV_B"
    """From here on, expect the gradient of the stage's output from the next stage."""
    SENT_BACKWARD = "SENT_B"
    """The previous stage has used the gradient by now: end the send and release its memory."""


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT})
"""The kinds allowed in a table."""
GIVES_INPUT_GRADIENT = frozenset({Kind.BACKWARD, Kind.INPUT})
"""Kinds after which the previous stage can run its backward pass."""
ENDS_MICRO_BATCH = frozenset({Kind.BACKWARD, Kind.WEIGHT})
"""Kinds after which the stage holds nothing of the micro-batch any more."""

_ACTION = re.compile(rf"(\d+)({'|'.join(kind.value for kind in Kind)})(\d+)")
_OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_REDUCE = re.compile(r"\d+REDUCE_GRAD")
_SHARDING = re.compile(r"\d+(UNSHARD|RESHARD)")


class Action(NamedTuple):
    """One piece of work of one rank. `str(action)` is text such as `2F0`, which `parse` reads."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parse text such as `2F0`.

        Raises:
            ScheduleError: If the text is not an action.
        """
        found = _ACTION.fullmatch(text.strip())
        if found is None:
            raise ScheduleError(
                f"{text!r} is not an action. Write stage, kind and micro-batch, such as 2F0. The kinds are F "
                "(forward), B (backward), I (input gradient) and W (weight gradient).",
                code="C051",
            )
        return cls(int(found[1]), Kind(found[2]), int(found[3]))


Table: TypeAlias = "dict[int, list[Action]]"
"""Pipeline rank -> its actions in order."""
Cell: TypeAlias = "Action | str | None"
Row: TypeAlias = "str | Sequence[Cell]"


def parse_table(rows: Mapping[int, Row] | Sequence[Row]) -> Table:
    """Make a table from rows, one per pipeline rank: a string `"0F0 0F1"`, or a list of actions, strings and None.

    Empty cells (None, "") are waits. They are dropped, because the executor waits automatically. The `pipeline_order` of
    torch.distributed.pipelining is accepted unchanged: `(0F1;3B0)OVERLAP_F_B` becomes F then B, and REDUCE_GRAD is dropped,
    because the engine reduces gradients as soon as they are complete.

    Raises:
        ScheduleError: If a cell is not an action, a cell is UNSHARD or RESHARD, or ranks are missing.
    """
    items = rows.items() if isinstance(rows, Mapping) else enumerate(rows)
    table: Table = {}
    for rank, row in items:
        cells: Iterable[Cell] = re.split(r"[,\s]+", row) if isinstance(row, str) else row
        table[rank] = [action for cell in cells for action in _parse_cell(cell)]
    if sorted(table) != list(range(len(table))) or not table:
        raise ScheduleError(
            f"a table needs one row for each pipeline rank, numbered from 0. This table has rows for {listed(table)}.",
            code="C051",
        )
    return dict(sorted(table.items()))


def read_csv(path: str | Path) -> Table:
    """Read a table from a CSV file. Line r has the actions of pipeline rank r; empty cells are waits."""
    file_path = local_path(path, "the table of actions", ScheduleError)
    try:
        with file_path.open(encoding="utf-8", newline="") as file:
            return parse_table([row for row in csv.reader(file) if row])
    except OSError as error:
        raise ScheduleError(f"the table of actions {str(path)!r} cannot be read: {error}", code="C051") from error
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}", code="C051") from error


def format_rows(table: Table) -> list[str]:
    """Format a table as one string per rank, such as `"0F0 0F1 0B0"`; the inverse of `parse_table`."""
    return [" ".join(map(str, table[rank])) for rank in sorted(table)]


def only_forward(table: Table) -> Table:
    """A table with only the forward passes of `table`, in the same order, for evaluation."""
    return {rank: [action for action in actions if action.kind is Kind.FORWARD] for rank, actions in table.items()}


def _parse_cell(cell: object) -> list[Action]:
    """The actions of a cell: none, one, or the two of an overlapped pair."""
    if isinstance(cell, Action):
        return [cell]
    text = "" if cell is None else str(cell).strip()
    overlapped = _OVERLAPPED.fullmatch(text)
    if overlapped:
        return [Action.parse(part) for part in overlapped[1].split(";")]
    if _SHARDING.fullmatch(text):
        raise ScheduleError(
            f"{text} is not supported in a table: ZeRO stage 3 (FSDP2) gathers and frees parameters in each pass. "
            "Leave out UNSHARD and RESHARD.",
            code="C051",
        )
    return [Action.parse(text)] if text and not _REDUCE.fullmatch(text) else []

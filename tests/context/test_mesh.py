"""Which modes make a mesh: those that form a grid around a rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from colonnade.context.parallel_context import _rank_grid
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import ContextError

ROWS, COLUMNS = ParallelMode.DATA, ParallelMode.TENSOR


def layout_of(rows: list[list[int]], columns: list[list[int]]) -> Any:
    groups = {ROWS: rows, COLUMNS: columns}
    return SimpleNamespace(group_of=lambda mode, rank: next(group for group in groups[mode] if rank in group))


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        ([[0, 1], [2, 3]], [[0, 1], [2, 3]]),  # the same ranks twice
        ([[0, 1], [2, 5], [3, 4]], [[0, 5], [1, 3], [2, 4]]),  # other ranks from another corner
    ],
)
def test_modes_that_do_not_form_one_are_refused(rows, columns):
    with pytest.raises(ContextError, match="do not form a grid around rank 0"):
        _rank_grid(layout_of(rows, columns), [ROWS, COLUMNS], 0)

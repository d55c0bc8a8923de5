"""Every case of the grid equals one process: loss, gradients, norm and weights after three steps, to 1e-10."""

from __future__ import annotations

import pytest

from colonnade.testing import run_world
from tests.models.grid import GRID, Case, trained


def marks(case: Case) -> list[pytest.MarkDecorator]:
    """Two ranks are quick; of more, every mode and every mix once."""
    if case.ranks <= 2:
        return []
    return [pytest.mark.slow if case.model in ("GPT, tied", "MoE-GPT") else pytest.mark.long]


@pytest.mark.parametrize("case", [pytest.param(case, marks=marks(case), id=str(case)) for case in GRID])
def test_models_equal_one_process(case):
    run_world(case.ranks, trained, case, timeout=100)

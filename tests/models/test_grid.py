"""Every case of the grid equals one process: loss, gradients, norm and weights after three steps, to 1e-10."""

from __future__ import annotations

import pytest

from colonnade.testing import run_world
from tests.models.grid import GRID, trained


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if case.ranks > 2 else [], id=str(case)) for case in GRID]
)
def test_models_equal_one_process(case):
    run_world(case.ranks, trained, case, timeout=100)

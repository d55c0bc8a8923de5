"""Every case of the grid equals one process: loss, gradients, norm and weights after three steps, to 1e-10."""

from __future__ import annotations

import pytest

from colonnade.testing import run_world
from tests.models.grid import Case, mixes, train_all


def marks(cases: list[Case]) -> list[pytest.MarkDecorator]:
    """Two ranks are quick; more are slow."""
    return [] if cases[0].ranks <= 2 else [pytest.mark.slow]


@pytest.mark.parametrize("cases", [pytest.param(cases, marks=marks(cases), id=mix) for mix, cases in mixes().items()])
def test_models_equal_one_process(cases):
    """Models under the same mix, one after another in one world."""
    run_world(cases[0].ranks, train_all, cases, timeout=100)

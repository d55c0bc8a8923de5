"""Every case of the grid equals one process: loss, gradients, norm and weights after three steps, to 1e-10."""

from __future__ import annotations

import pytest

from colonnade.testing import run_world
from tests.models.grid import Case, is_long, mixes, train_all


def marks(cases: list[Case]) -> list[pytest.MarkDecorator]:
    """Of many ranks, every mode and every mix once with each kind of model; the rest is long."""
    return [pytest.mark.long] if is_long(cases[0]) else []


@pytest.mark.parametrize("cases", [pytest.param(cases, marks=marks(cases), id=mix) for mix, cases in mixes().items()])
def test_models_equal_one_process(cases):
    """Models under the same mix, one after another in one world."""
    run_world(cases[0].ranks, train_all, cases, timeout=100)

"""Healthy runs with odd features are found equal to one process; what cannot be compared is refused in words."""

from __future__ import annotations

import pytest

from colonnade.testing import run_world
from tests.proof.odd import BEGUN, RUNS, said_of_all

pytestmark = pytest.mark.slow


def test_nothing_is_said_of_odd_runs() -> None:
    found = run_world(2, said_of_all, list(RUNS), timeout=100).values[0]
    assert not {name: said for name, said in found.items() if said}


def test_an_optimizer_that_has_stepped_already_is_refused_on_every_rank() -> None:
    for told in run_world(2, said_of_all, list(BEGUN)).values:
        assert all("has already stepped" in said for said in told.values()), told

"""No false alarm: the grid of the library's models and the table of Hugging Face under `verify`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.models.grid import mixes
from tests.proof.no_alarm import EQUAL, TRAINED, grid_verdicts, table_verdicts

SHARES = 6
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.mark.parametrize("cases", list(mixes().values()), ids=list(mixes()))
def test_models_of_the_grid_are_found_equal(cases: Any) -> None:
    assert {name: verdict for name, verdict in grid_verdicts(cases).items() if verdict != EQUAL} == {}


@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("layout", TRAINED, ids=lambda layout: layout.name)
def test_architectures_of_the_table_are_found_equal_or_refused(layout: Any, share: int) -> None:
    zoo = pytest.importorskip("tests.hf.zoo", reason="needs transformers")
    found = table_verdicts(layout, zoo.ARCHITECTURES[share::SHARES])
    assert {name: said for name, said in found.items() if said != EQUAL and not said.startswith("refused")} == {}

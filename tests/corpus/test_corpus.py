"""Every bug of the corpus is found, and nearly every one is called by its name."""

from __future__ import annotations

import pytest

from tests.corpus.runner import names
from tests.corpus.table import in_one_world, results, worlds

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", names())
def test_the_bug_is_found(name: str) -> None:
    (world,) = (some for some in worlds(tuple(names())) if name in some)
    (found,) = (one for one in in_one_world(world) if one.name == name)
    assert found.found, f"{found.bug.what}: {found.error or 'said to be equal to one process'}"


def test_nine_of_ten_causes_are_named() -> None:
    found = results()
    missed = {one.name: (one.bug.cause, one.causes) for one in found if not one.named}
    assert len(found) >= 60
    assert len(missed) <= len(found) / 10, missed

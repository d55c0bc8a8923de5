"""What the tests of the alias share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from colonnade import compat


@pytest.fixture
def alias() -> Iterator[None]:
    compat.install()
    yield
    compat.uninstall()

"""The plan that tests of pages look at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.proof.report.plans import plan_by_command


@pytest.fixture(scope="session")
def planned(tmp_path_factory) -> tuple[dict[str, Any], Path]:
    """A plan of 8 ranks, and the folder with its page and pictures."""
    folder = tmp_path_factory.mktemp("planned")
    return plan_by_command(folder), folder

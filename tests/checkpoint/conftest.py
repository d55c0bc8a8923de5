"""A checkpoint of four ranks, written once for all tests that only read it or copy it."""

from __future__ import annotations

from pathlib import Path

import pytest

from colonnade.testing import run_world
from tests.checkpoint.test_load import save_on


@pytest.fixture(scope="session")
def four_ranks(tmp_path_factory) -> Path:
    """The folder of a run of tensor 2 x pipeline 2 with one checkpoint, of step 1."""
    folder = tmp_path_factory.mktemp("four_ranks")
    run_world(4, save_on, "tensor 2 x pipeline 2", folder)
    return folder

"""A checkpoint of four ranks, written once for all tests that only read it or copy it; what is synced, and what is open."""

from __future__ import annotations

import os
from collections.abc import Callable
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


@pytest.fixture
def synced(monkeypatch) -> list[tuple[str, int]]:
    """The name and the size of each file and folder as it is seen on disk."""
    seen: list[tuple[str, int]] = []

    def fsync(descriptor: int, fsync: Callable[[int], None] = os.fsync) -> None:
        seen.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")).name, os.fstat(descriptor).st_size))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return seen


@pytest.fixture
def opened() -> Callable[[], list[str]]:
    """Gives what this process has opened since the test began and not closed again."""
    before = os.listdir("/proc/self/fd")
    return lambda: [name for name in os.listdir("/proc/self/fd") if name not in before]

"""What is read of a folder that may hold anything: no more than a manifest can be."""

from __future__ import annotations

import os

import pytest

from colonnade.checkpoint import storage as module
from colonnade.checkpoint.manifest import MANIFEST
from colonnade.checkpoint.storage import read_manifest
from colonnade.errors import CheckpointError


def test_a_manifest_longer_than_a_quarter_of_a_gib_is_not_read(tmp_path, monkeypatch):
    (tmp_path / MANIFEST).write_bytes(b"")
    os.truncate(tmp_path / MANIFEST, (1 << 28) + 1)  # takes no room on the disk
    with pytest.raises(CheckpointError, match=f"more than the {1 << 28} bytes that are read"):
        read_manifest(tmp_path)
    os.truncate(tmp_path / MANIFEST, 100)
    monkeypatch.setattr(module, "_LONGEST", 100)
    with pytest.raises(CheckpointError) as told:
        read_manifest(tmp_path)
    assert "that are read" not in str(told.value)

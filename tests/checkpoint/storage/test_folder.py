"""The folder of a run: what is listed, what is kept, and whether there is room."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace

import pytest

from colonnade.checkpoint import storage as module
from colonnade.checkpoint.storage import check_space, clean, no_space_errors, published, step_of
from colonnade.errors import CheckpointError


@pytest.fixture
def free(monkeypatch):
    """Sets how many bytes the disk has left."""
    room = SimpleNamespace(free=0)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: room)
    return room


def test_a_save_begins_only_with_a_tenth_more_room_than_it_needs(tmp_path, free):
    free.free = 1100
    check_space(tmp_path, 1000)
    for free.free in (1099, 1000, 0):
        with pytest.raises(CheckpointError, match="no space for the checkpoint"):
            check_space(tmp_path, 1000)


def test_a_full_disk_is_told_as_such_and_other_errors_stay(tmp_path, free):
    for number in (errno.ENOSPC, errno.EDQUOT):
        with (
            pytest.raises(CheckpointError, match=r"no space .* Earlier checkpoints are unchanged"),
            no_space_errors(tmp_path, 5),
        ):
            raise OSError(number, "full")
    with pytest.raises(PermissionError), no_space_errors(tmp_path, 5):
        raise PermissionError(errno.EACCES, "no")


def steps(folder):
    return [(found.step, found.revision) for found in published(folder)]


def test_what_is_a_checkpoint_and_what_is_not(tmp_path):
    for name in ("step-00000010", "step-00000002", "step-00000010.r1", "step-1", "step-00000003.x", ".tmp-4-0123abcd"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000007").write_text("a file")
    (tmp_path / "step-00000008").symlink_to(tmp_path / "step-00000010")
    (tmp_path / ".tmp-8-0123abcd").symlink_to(tmp_path / "step-00000010")
    (tmp_path / ".tmp-9-0123abcd").write_text("a file")
    assert steps(tmp_path) == [(2, 0), (10, 0), (10, 1)]
    assert step_of(tmp_path / "step-00000010.r1") == 10
    assert step_of(tmp_path / "other") is None
    clean(tmp_path)
    assert sorted(path.name for path in tmp_path.glob(".tmp*")) == [".tmp-8-0123abcd", ".tmp-9-0123abcd"]
    assert steps(tmp_path) == [(2, 0), (10, 0), (10, 1)]
    assert (tmp_path / "step-1").exists()
    assert published(tmp_path / "nowhere") == []
    with pytest.raises(CheckpointError, match="is a file"):
        published(tmp_path / "step-00000007")


def test_what_cannot_be_deleted_is_left_for_the_next_time(tmp_path, monkeypatch):
    for name in (".tmp-1-00000000", ".tmp-2-00000000", "step-3"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", refuse)
        clean(tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
    clean(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-3"]

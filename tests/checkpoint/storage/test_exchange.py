"""Folders of weights that are written anew: links are followed, what is not of the weights is left where it is, kills lose nothing."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from colonnade.checkpoint import CheckpointManager, full_weights, storage
from colonnade.checkpoint.export import export_checkpoint, export_full
from colonnade.checkpoint.full_weights import tensors_in
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import CheckpointError
from tests.checkpoint.storage.test_writer import Kill, model_at

POINTS = ("files written", "folder synced", "head aside", "old ones aside", "files placed", "heads placed", "renamed")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two checkpoints, whose weights are their step."""
    with CheckpointManager(tmp_path / "run", ParallelContext()) as manager:
        for step in (1, 2):
            manager.save(step, model_at(step))
    return tmp_path / "run"


def fill(folder: Path) -> dict[str, int]:
    """Give a folder what is not ours; returns the inode of each file and folder, which a copy does not keep."""
    (folder / "checkpoints/step-00000001").mkdir(parents=True)
    (folder / "checkpoints/step-00000001/large.bin").write_bytes(b"0" * 1000)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "notes").symlink_to(folder / "checkpoints")
    return inodes(folder)


def inodes(folder: Path) -> dict[str, int]:
    found = [folder, *(path for path in folder.rglob("*") if "model" not in path.name and "dist" not in path.name)]
    return {str(path.relative_to(folder)): os.lstat(path).st_ino for path in found if path.name != ".metadata"}


def weight_in(folder: Path) -> float:
    """That of all weights, as a reader finds them."""
    (found,) = {value for tensor in tensors_in(folder).values() for value in tensor.read().flatten().tolist()}
    return found


def test_what_else_lies_in_a_folder_is_left_where_it_is(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    before = fill(out)
    (out / "model-00001-of-00002.safetensors").write_text("of an earlier save")
    for step in (1, 2):
        export_checkpoint(run, out, "hf", step)
        assert weight_in(out) == step
        assert inodes(out) == before
    assert not (out / "model-00001-of-00002.safetensors").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_room_is_made_and_what_was_interrupted_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staged = storage.staging_path(tmp_path / "a/b/out")
    assert staged.parent == tmp_path / "a/b"
    for _ in range(2):
        storage.make_room(staged, 10)
    assert list(staged.parent.iterdir()) == []
    (staged.parent / ".out.saving-01234567").write_text("")
    (staged.parent / ".out.saving-89abcdef/inside").mkdir(parents=True)
    (staged.parent / ".out.saving-mine").write_text("")
    storage.make_room(staged, 10)
    assert [path.name for path in staged.parent.iterdir()] == [".out.saving-mine"]
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(CheckpointError, match="no space"):
        storage.make_room(staged, 10)


def test_every_file_and_then_every_name_is_on_disk(
    run: Path, tmp_path: Path, synced: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def names() -> list[str]:
        found = [re.sub("[0-9a-f]{8}$", "*", name) for name, _ in synced]
        synced.clear()
        return found

    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/config.json").write_text("{}")
    passed: list[str] = []
    monkeypatch.setattr(storage, "hook", passed.append)
    for folders_synced in ([".out.saving-*", tmp_path.name], [".saving-*", *["out"] * 4]):
        export_checkpoint(run, tmp_path / "out", "hf", 1, tmp_path / "configs")
        written, *files = names()
        assert written == "model.safetensors"
        assert sorted(files[:2]) == ["config.json", "model.safetensors"]
        assert files[2:] == folders_synced
        assert passed.count("folder synced") == passed.count("renamed") == 1
        passed.clear()
    export_full(run, tmp_path / "all.safetensors")
    assert names() == [".all.safetensors.saving-*", tmp_path.name]


def test_links_are_followed(run: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    (tmp_path / "out").symlink_to(disk)
    (tmp_path / "later").symlink_to(tmp_path / "not there/yet")
    (tmp_path / "all.safetensors").symlink_to(disk / "all.safetensors")
    for step in (1, 2):
        for out in (tmp_path / "out", tmp_path / "later"):
            export_checkpoint(run, out, "hf", step)
            assert out.is_symlink()
            assert weight_in(out) == step
        assert export_full(run, tmp_path / "all.safetensors").is_symlink()
    assert sorted(path.name for path in disk.iterdir()) == ["all.safetensors", "model.safetensors"]
    assert sorted(path.name for path in (tmp_path / "not there").iterdir()) == ["yet"]


def test_the_working_directory_stays_what_it_is(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    (out / "inside").mkdir(parents=True)
    for here, target in ((out, "."), (out, out), (out / "inside", "..")):
        monkeypatch.chdir(here)
        export_checkpoint(run, target, "hf")
        assert Path.cwd() == here
        assert os.stat(".").st_ino == here.stat().st_ino
    assert weight_in(out) == 2


def test_a_failure_puts_everything_back(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    out.mkdir()
    fill(out)
    export_checkpoint(run, out, "hf", 1)
    passed: list[str] = []
    monkeypatch.setattr(storage, "hook", passed.append)
    export_checkpoint(run, out, "hf", 1)
    assert set(POINTS) < set(passed)
    before = sorted(out.rglob("*"))
    for point in POINTS[:-1]:

        def fail(name: str, point: str = point) -> None:
            if name == point:
                raise OSError("the disk is gone")

        monkeypatch.setattr(storage, "hook", fail)
        with pytest.raises(CheckpointError, match="the disk is gone"):
            export_checkpoint(run, out, "hf", 2)
        assert sorted(out.rglob("*")) == before, point
        assert weight_in(out) == 1
    (out / "model.safetensors").unlink()
    (out / "model.safetensors").mkdir()  # which no file can take the place of
    monkeypatch.setattr(storage, "hook", None)
    (out / "model.safetensors/mine").write_text("")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is a folder"):
        export_checkpoint(run, out, "hf", 2)
    assert (out / "model.safetensors/mine").exists()


def _export_until_killed(run: Path, out: Path, point: str) -> None:
    storage.hook = Kill(point)
    export_checkpoint(run, out, "hf", 2)


@pytest.mark.parametrize("largest", [full_weights.LARGEST, 100], ids=["one file", "two files"])
@pytest.mark.parametrize("point", POINTS)
def test_a_kill_loses_nothing_and_leaves_no_mixture(
    run: Path, tmp_path: Path, point: str, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier weights, or the new ones, or none that a reader would take; and the next save cleans up."""
    monkeypatch.setattr(full_weights, "LARGEST", largest)
    out = tmp_path / "out"
    out.mkdir()
    export_checkpoint(run, out, "hf", 1)
    before = fill(out)
    killed = multiprocessing.get_context("fork").Process(target=_export_until_killed, args=(run, out, point))
    killed.start()
    killed.join(20)
    assert killed.exitcode == -signal.SIGKILL
    assert inodes(out).items() >= before.items()
    if point not in ("head aside", "old ones aside", "files placed"):
        assert weight_in(out) == (2 if point in POINTS[-2:] else 1)
    else:
        (old,) = out.glob(".old-*")
        assert point == "head aside" or weight_in(old) == 1
        with pytest.raises(CheckpointError, match=r"has no weights.*was killed while it replaced the weights.*\.old-"):
            tensors_in(out)
    export_checkpoint(run, out, "hf", 2)
    assert weight_in(out) == 2
    assert inodes(out) == before


@pytest.mark.slow
def test_torch_reads_what_was_exported_over_an_earlier_one(run: Path, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    out = tmp_path / "dcp"
    export_checkpoint(run, out, "dcp", 1)
    before = fill(out)
    export_checkpoint(run, out, "dcp", 2)
    assert inodes(out) == before
    state = {"model": {"weight": torch.zeros(6, 6)}}
    dcp.load(state, checkpoint_id=out, no_dist=True)
    assert state["model"]["weight"][0, 0] == 2

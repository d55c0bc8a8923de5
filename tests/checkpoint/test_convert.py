"""A checkpoint of any layout as one file that plain torch loads."""

from __future__ import annotations

import errno
import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from colonnade.checkpoint import CheckpointManager, export_full, fault
from colonnade.checkpoint.convert import find_checkpoint
from colonnade.checkpoint.format.manifest import MANIFEST
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import CheckpointError
from tests.checkpoint.models import WAYS, build, truth_after
from tests.checkpoint.test_load import STEPS


def test_the_full_file_loads_in_plain_torch(four_ranks, tmp_path):
    file = export_full(four_ranks / "step-00000001", tmp_path / "new/and/newer/full.safetensors")
    built = build(WAYS["one"], ParallelContext(), 99)
    assert built.model.load_state_dict(load_file(file)).missing_keys == []
    truth = truth_after(STEPS)
    for name, value in built.model.state_dict().items():
        assert torch.equal(value, truth[name]), name
        assert value.dtype == truth[name].dtype
    assert [path.name for path in file.parent.iterdir()] == ["full.safetensors"]


def _fail(point: str) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_the_full_file_replaces_one_that_is_there_only_when_it_is_whole(four_ranks, tmp_path, monkeypatch):
    file = tmp_path / "full.safetensors"
    file.write_text("old")
    with pytest.raises(CheckpointError, match="has no good checkpoint"):
        export_full(tmp_path, file)
    with monkeypatch.context() as patched:
        patched.setattr(fault, "hook", _fail)
        with pytest.raises(CheckpointError, match="no space"):
            export_full(four_ranks / "step-00000001", file)
    assert file.read_text() == "old"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["full.safetensors"]
    export_full(four_ranks / "step-00000001", file)
    assert file.stat().st_size > 100


def test_the_newest_good_checkpoint_is_found(tmp_path):
    with CheckpointManager(tmp_path, ParallelContext()) as manager:
        for step in (1, 2):
            manager.save(step, nn.Linear(1, 1))
    assert find_checkpoint(tmp_path).name == "step-00000002"
    assert find_checkpoint(tmp_path, 1).name == "step-00000001"
    (tmp_path / "step-00000002/rank-00000.safetensors").write_bytes(b"x")
    assert find_checkpoint(tmp_path).name == "step-00000001"
    assert find_checkpoint(tmp_path / "step-00000002") == tmp_path / "step-00000002"
    with pytest.raises(
        CheckpointError, match=r"no good checkpoint of step 2\s+step-00000002: rank-00000\.safetensors has 1 bytes"
    ):
        find_checkpoint(tmp_path, 2)


def test_a_manifest_reads_as_json(four_ranks):
    content = json.loads((four_ranks / "step-00000001" / MANIFEST).read_text())
    assert content["format"] == 2
    assert content["layout"]["axes"] == [["data", 1, "data"], ["pipeline", 2, "pipe"], ["tensor", 2, "tensor"]]
    tie = next(tensor for tensor in content["tensors"] if tensor["label"] == "tie:wte" and not tensor["slot"])
    assert tie["names"] == ["embed.weight", "head.weight"]
    (part,) = tie["parts"]
    assert (part["offset"], part["shape"], part["key"]) == ([0, 0], [10, 6], "model/tie:wte")
    assert content["cuts"][part["cut"]] == {"stops": [5, 10], "files": [0, 1]}

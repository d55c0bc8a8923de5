"""A checkpoint of any layout as one file that plain torch loads."""

from __future__ import annotations

import errno

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from colonnade.checkpoint import CheckpointManager, export_checkpoint, export_full, import_checkpoint, storage, verify
from colonnade.checkpoint.export import ForeignState, _state_of, find_checkpoint, write_checkpoint
from colonnade.checkpoint.tensor_files import FileEntry
from colonnade.checkpoint.values import encode
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import CheckpointError
from colonnade.parallel.flat import MASTER
from colonnade.testing import in_double
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
    with pytest.raises(CheckpointError, match=r"has no intact checkpoint \[C080\]\Z"):
        export_full(tmp_path, file)
    with monkeypatch.context() as patched:
        patched.setattr(storage, "hook", _fail)
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
    (tmp_path / "step-00000001").rename(tmp_path / "mine")
    assert find_checkpoint(tmp_path / "mine") == tmp_path / "mine"  # by its manifest
    (tmp_path / "step-00000003").mkdir()
    assert find_checkpoint(tmp_path / "step-00000003") == tmp_path / "step-00000003"  # by its name
    with pytest.raises(
        CheckpointError, match=r"no intact checkpoint of step 2\s+step-00000002: rank-00000\.safetensors has 1 bytes"
    ):
        find_checkpoint(tmp_path, 2)


def test_inside_in_double_files_keep_the_dtypes_that_were_saved(tmp_path):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
    with in_double(), CheckpointManager(tmp_path / "run", ParallelContext()) as manager:
        manager.save(1, model, optimizer)
        found = load_file(export_full(tmp_path / "run", tmp_path / "full.safetensors"))
        for value in (*model.parameters(), *(state["exp_avg"] for state in optimizer.state.values())):
            value.data.zero_()
        manager.load(model, optimizer)
    for name, value in expected.items():
        assert found[name].dtype is torch.float32
        assert found[name].equal(value)
        assert model.state_dict()[name].equal(value)
    assert all(state["exp_avg"].equal(one) for state, one in zip(optimizer.state.values(), moments, strict=True))


def test_what_came_from_elsewhere_goes_there_again(tmp_path):
    tensors = {
        "a": torch.rand(3, 2),
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 3),
        "none": torch.zeros(3, 0),
    }
    moments = {"exp_avg": FileEntry.of("", torch.rand(3, 2)), MASTER: FileEntry.of("", torch.rand(3, 2)), "step": 7}
    options = [{"lr": torch.tensor(0.5), "betas": (0.8, 0.9)}, {"lr": 0.1, "tags": [1]}]
    groups = [(["a", "scalar"], options[0]), (["none"], options[1])]
    state = ForeignState({name: FileEntry.of(name, value) for name, value in tensors.items()}, {"a": moments}, groups)
    path = write_checkpoint(state, tmp_path, 5)
    assert path == tmp_path / "step-00000005"
    assert (tmp_path / "run.lock").read_text() == ""  # given back
    manifest = verify(path)
    assert manifest.layout.world_size == 1
    assert {item.ranks for item in [*manifest.items, *(group.options for group in manifest.groups)]} == {(0,)}

    found = _state_of(path, under_all_names=True)
    assert found.weights.keys() == tensors.keys()
    assert all(torch.equal(found.weights[name].read(), value) for name, value in tensors.items())
    ((label, kept),) = found.optimizer.items()
    assert (label, kept.keys(), kept["step"]) == ("a", {"exp_avg", "step"}, 7)  # a master copy is ours alone
    assert torch.equal(kept["exp_avg"].read(), moments["exp_avg"].read())
    assert [names for names, _ in found.groups] == [names for names, _ in groups]
    for (_, one), other in zip(found.groups, options, strict=True):
        assert encode(one, "it").digest() == encode(other, "it").digest()
    assert _state_of(write_checkpoint(ForeignState(state.weights), tmp_path / "alone", 0), True).groups is None


def test_an_optimizers_state_goes_by_the_first_name_and_extra_values_do_not(tmp_path):
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[model[0].weight] = {"momentum_buffer": torch.ones(1, 1), "count": 3}
    with CheckpointManager(tmp_path, ParallelContext()) as manager:
        manager.save(1, model, optimizer, extra={"mine/0.weight": 5})
    for under_all_names, names in ((True, {"0.weight", "1.weight"}), (False, {"0.weight"})):
        found = _state_of(tmp_path / "step-00000001", under_all_names)
        assert found.weights.keys() == names
        ((label, kept),) = found.optimizer.items()
        assert (label, kept.keys(), kept["count"]) == ("0.weight", {"momentum_buffer", "count"}, 3)
        assert [names for names, _ in found.groups or ()] == [["0.weight"]]


def test_an_import_that_fails_leaves_nothing(tmp_path, monkeypatch):
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    with monkeypatch.context() as patched:
        patched.setattr(storage, "hook", _fail)
        with pytest.raises(CheckpointError, match="No space left"):
            import_checkpoint(tmp_path / "one.safetensors", tmp_path / "run", "safetensors")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.lock"]
    path = import_checkpoint(tmp_path / "one.safetensors", tmp_path / "run", "safetensors")
    assert path.name == "step-00000000"
    with pytest.raises(CheckpointError, match="format 'zip' is unknown; allowed are safetensors, hf, dcp"):
        export_checkpoint(tmp_path / "run", tmp_path / "out", "zip")
    with pytest.raises(CheckpointError, match=r"one\.safetensors is a file; give the name of a folder"):
        export_checkpoint(tmp_path / "run", tmp_path / "one.safetensors", "hf")
    out = export_checkpoint(path, tmp_path / "out.safetensors", "safetensors")
    assert load_file(out)["a"].tolist() == [1, 1]

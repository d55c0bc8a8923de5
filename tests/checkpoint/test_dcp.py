"""Folders of torch.distributed.checkpoint, in and out: weights and optimizer, to the bit; and only where they are trusted."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from colonnade.checkpoint import CheckpointManager, export_checkpoint, import_checkpoint
from colonnade.checkpoint.export import read_dcp
from colonnade.checkpoint.tensor_files import FileEntry
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import CheckpointError
from colonnade.testing import run_world

pytestmark = pytest.mark.slow  # importing DCP alone takes two seconds


class Tied(nn.Module):
    """With a weight under two names, a scalar, a buffer, and something empty."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.mid = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("seen", torch.tensor([3, 4]))
        self.register_buffer("nothing", torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mid(self.embed(x)) * self.gain)


def trained(steps: int = 2, seed: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Tied()
    groups = [{"params": [model.embed.weight, model.gain], "lr": 0.1}, {"params": list(model.mid.parameters())}]
    optimizer = torch.optim.AdamW(groups, lr=0.02, betas=(0.8, 0.9))
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.tensor([0, 3, 5])).square().sum().backward()
    optimizer.step()


def equal(model: nn.Module, other: nn.Module) -> bool:
    theirs = other.state_dict()
    return all(torch.equal(value, theirs[name]) for name, value in model.state_dict().items())


def form(kind: str, model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """What a trainer saves: as torch's examples do, flat, or as torchtitan does."""
    flat = StateDictOptions(flatten_optimizer_state_dict=kind != "examples")
    weights, state = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer, options=flat)
    if kind == "titan":
        return {**weights, "optimizer": state, "train_state": {"step": torch.tensor(7)}}
    return {"model": weights, "optim": state}


@pytest.mark.parametrize("kind", ["examples", "flat", "titan"])
def test_weights_and_optimizer_come_in_and_go_out(kind: str, tmp_path: Path) -> None:
    model, optimizer = trained()
    dcp.save(form(kind, model, optimizer), checkpoint_id=tmp_path / "theirs", no_dist=True)
    path = import_checkpoint(tmp_path / "theirs", tmp_path / "run", "dcp", 5, trust=True)
    assert path.name == "step-00000005"
    mine, own = trained(1, seed=2)
    with CheckpointManager(tmp_path / "run", ParallelContext()) as manager:
        assert manager.load(mine, own).step == 5
    assert equal(mine, model)
    out = export_checkpoint(tmp_path / "run", tmp_path / "out", "dcp")
    for one in ((model, optimizer), (mine, own)):
        step(*one)
    assert equal(mine, model)

    back, last = trained(1, seed=3)  # by torch alone
    state = {"model": get_model_state_dict(back), "optim": get_optimizer_state_dict(back, last)}
    dcp.load(state, checkpoint_id=out, no_dist=True)
    set_model_state_dict(back, state["model"])
    set_optimizer_state_dict(back, last, state["optim"])
    step(back, last)
    assert equal(back, model)


ONE = torch.ones(1)


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ({"model": {"a": ONE, "b": {"c": ONE}}, "other": ONE}, ["a", "b.c"]),
        ({"model": {"a": ONE}}, ["a"]),
        ({"model.a": ONE, "b": ONE, "optim.x": ONE}, ["a"]),  # flat, beside an optimizer
        ({"model.a": ONE, "b": ONE}, ["b", "model.a"]),  # weights whose own names begin so
        ({"a": ONE, "optimizers": {"x": ONE}, "train_state": {"step": ONE}, "epoch": ONE}, ["a"]),
        ({"model": ONE}, ["model"]),
        ({"x": {"model": ONE}}, ["x.model"]),
    ],
    ids=lambda value: ", ".join(value),
)
def test_which_tensors_of_a_folder_are_weights(content: Any, names: list[str], tmp_path: Path) -> None:
    dcp.save(content, checkpoint_id=tmp_path, no_dist=True)
    found = read_dcp(tmp_path, trust=True)
    assert sorted(found.weights) == names
    assert (found.optimizer, found.groups) == ({}, None)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    dcp.save({"optim": {"x": ONE}}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(CheckpointError, match=r"has no model weights\. The folder contains the tensors optim\.x"):
        read_dcp(tmp_path, trust=True)


def test_the_optimizer_of_a_folder(tmp_path: Path) -> None:
    """Groups by their numbers or by their parameters; what is kept for others than weights is left out."""
    weights = {"a": torch.ones(2), "b.c": ONE}
    state = {"a": {"exp_avg": torch.full((2,), 3.0), "note": "x"}, "lost": {"exp_avg": ONE}, "a.none": 1}
    groups = [
        {"params": ["b.c"], "lr": torch.tensor(0.5), "betas": [0.8, 0.9], "tags": [ONE, 2 * ONE], "two": torch.ones(2)},
        {"params": ["a"], "lr": 0.1},
    ]
    for number, listing in enumerate((groups, {str(at): group for at, group in enumerate(groups)})):
        content = {"model": weights, "optim": {"state": state, "param_groups": listing, "odd": {"a": {"lr": 1}}}}
        dcp.save(content, checkpoint_id=tmp_path / str(number), no_dist=True)
        found = read_dcp(tmp_path / str(number), trust=True)
        assert found.optimizer.keys() == {"a"}
        assert found.optimizer["a"]["note"] == "x"
        assert found.optimizer["a"]["exp_avg"].read().tolist() == [3, 3]
        assert [names for names, _ in found.groups or ()] == [["b.c"], ["a"]]
        (one, other) = (options for _, options in found.groups or ())
        assert (one["lr"], one["betas"], one["tags"], one["two"].tolist()) == (0.5, (0.8, 0.9), [1.0, 2.0], [1, 1])
        assert other == {"lr": 0.1}
        assert isinstance(one["lr"], float)

    named = {f"optim.param_groups.{label}.lr": rate for label, rate in (("a", 0.1), ("b.c", 0.2), ("lost", 0.3))}
    dcp.save({"model": weights, **named}, checkpoint_id=tmp_path / "named", no_dist=True)
    assert read_dcp(tmp_path / "named", trust=True).groups == [(["a"], {"lr": 0.1}), (["b.c"], {"lr": 0.2})]


def test_one_process_writes_one_file_without_a_word(tmp_path: Path) -> None:
    model, optimizer = trained()
    with CheckpointManager(tmp_path / "run", ParallelContext()) as manager:
        manager.save(1, model, optimizer)
    (tmp_path / "out").mkdir()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        out = export_checkpoint(tmp_path / "run", tmp_path / "out", "dcp")
        import_checkpoint(out, tmp_path / "again", "dcp", trust=True)
    assert [str(one.message) for one in warned if "torch.distributed is disabled" in str(one.message)] == []
    assert sorted(path.name for path in out.iterdir()) == [".metadata", "__0_0.distcp"]
    kept = read_dcp(out, trust=True).optimizer["embed.weight"]
    assert {name: type(value) for name, value in kept.items()} == dict.fromkeys(
        ("exp_avg", "exp_avg_sq", "step"), FileEntry
    )


def alone(folder: Path) -> None:
    """The second of two ranks goes out and in by itself."""
    if torch.distributed.get_rank() == 1:
        out = export_checkpoint(folder / "run", folder / "out", "dcp")
        import_checkpoint(out, folder / "again", "dcp", trust=True)


def test_one_rank_of_a_world_goes_out_and_in_alone(tmp_path: Path) -> None:
    model, optimizer = trained()
    with CheckpointManager(tmp_path / "run", ParallelContext()) as manager:
        manager.save(1, model, optimizer)
    run_world(2, alone, tmp_path, timeout=30)
    mine, own = trained(1, seed=2)
    with CheckpointManager(tmp_path / "again", ParallelContext()) as manager:
        manager.load(mine, own)
    assert equal(mine, model)


def test_only_what_is_trusted_is_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no \.metadata"):
        import_checkpoint(tmp_path, tmp_path / "run", "dcp", trust=True)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Explodes()))
    with pytest.raises(CheckpointError, match=r"\.metadata is a pickle, which can run code .* pass --trust"):
        import_checkpoint(tmp_path, tmp_path / "run", "dcp")
    with pytest.raises(CheckpointError, match="format 'zip' is unknown; allowed are safetensors, hf, dcp"):
        import_checkpoint(tmp_path, tmp_path / "run", "zip")
    with pytest.raises(CheckpointError, match="step is -1; pass a whole number, 0 or larger"):
        import_checkpoint(tmp_path, tmp_path / "run", "dcp", -1, trust=True)
    with pytest.raises(CheckpointError, match=r"is not a file. Pass a safetensors file"):
        import_checkpoint(tmp_path, tmp_path / "run", "safetensors")
    assert not (tmp_path / "run").exists()


class Explodes:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("it was unpickled",)


def test_files_and_folders_come_in_and_go_out(tmp_path: Path) -> None:
    model, optimizer = trained()
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    save_file(tensors, tmp_path / "one.safetensors")  # the tied weight twice
    import_checkpoint(tmp_path / "one.safetensors", tmp_path / "run", "safetensors", 1)
    mine, own = trained(0, seed=2)
    with CheckpointManager(tmp_path / "run", ParallelContext()) as manager:
        manager.load(mine)
        with pytest.raises(CheckpointError, match="optimizer"):
            manager.load(mine, own)
        manager.save(2, model, optimizer)
    assert equal(mine, model)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/config.json").write_text("{}")
    out = export_checkpoint(tmp_path / "run", tmp_path / "out", "hf", config=tmp_path / "configs")
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    found = load_file(out / "model.safetensors")
    assert found.keys() == tensors.keys() - {"head.weight"}  # which is tied, and written once
    import_checkpoint(out, tmp_path / "again", "hf")
    with CheckpointManager(tmp_path / "again", ParallelContext()) as manager:
        manager.load(mine := copy.deepcopy(mine))
    assert equal(mine, model)
    with pytest.raises(CheckpointError, match="pass a folder that contains config"):
        export_checkpoint(tmp_path / "run", tmp_path / "out", "hf", config=tmp_path)
    with pytest.raises(CheckpointError, match=r"out exists and is not a folder of torch\.distributed\.checkpoint"):
        export_checkpoint(tmp_path / "run", tmp_path / "out", "dcp")


def test_names_that_are_one_weight_must_have_one_value(tmp_path: Path) -> None:
    model, _ = trained(0)
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    tensors["head.weight"] += 1
    save_file(tensors, tmp_path / "one.safetensors")
    import_checkpoint(tmp_path / "one.safetensors", tmp_path / "run", "safetensors")
    with (
        CheckpointManager(tmp_path / "run", ParallelContext()) as manager,
        pytest.raises(
            CheckpointError, match=r"embed\.weight, head\.weight are one tied tensor in this model, but .* different"
        ),
    ):
        manager.load(model)

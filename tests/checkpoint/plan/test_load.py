"""A model and a checkpoint matched by name: what is used, what is missing, what does not fit, by the whole message."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from colonnade.checkpoint import CheckpointManager
from colonnade.checkpoint.export import ForeignState, write_checkpoint
from colonnade.checkpoint.load import TensorMatch
from colonnade.checkpoint.manifest import LayoutRecord, Manifest, TensorRecord
from colonnade.checkpoint.tensor_files import FileEntry
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import CheckpointError
from colonnade.parallel.flat import MASTER


def record(label: str, *names: str, shape: tuple[int, ...] = (2,), dtype: str = "F32", state: str = "") -> TensorRecord:
    return TensorRecord(label, state, names or (label,), shape, dtype, ())


def here(label: str, *names: str, shape: tuple[int, ...] = (2,), dtype: torch.dtype = torch.float32) -> Any:
    return SimpleNamespace(label=label, names=names or (label,), shape=shape, local=torch.zeros(shape, dtype=dtype))


def plan(tensors: list[Any], *records: TensorRecord) -> TensorMatch:
    return TensorMatch(tensors, Manifest(1, 0.0, LayoutRecord(1, ()), (), (), records, None, ()))


def test_every_name_of_either_side_finds_the_other():
    tensors = [here("a"), here("new", "b", "c"), here("d", "other")]
    made = plan(tensors, record("a"), record("old", "c"), record("x", "d"), record("a", state="exp_avg"))
    assert [made.record_of(tensor).label for tensor in tensors] == ["a", "old", "x"]
    assert made.note() == {"used": ["a", "old", "x"], "missing": [], "mismatched": []}
    made.check([made.note()], "it")


def saved(folder: Path, weights: dict[str, torch.Tensor], **masters: torch.Tensor) -> Path:
    entries = {name: FileEntry.of("", value) for name, value in weights.items()}
    kept = {name: {MASTER: FileEntry.of("", value)} for name, value in masters.items()}
    write_checkpoint(ForeignState(entries, kept, [(list(weights), {"lr": 0.1})]), folder, 1)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_master_is_read_in_the_place_of_its_rounded_weight(tmp_path, dtype):
    exact = torch.tensor([1.0, 2.001])
    model = nn.Module()
    model.a = nn.Parameter(torch.zeros(2, dtype=dtype))
    saved(tmp_path, {"a": exact.bfloat16()}, a=exact)
    with CheckpointManager(tmp_path, ParallelContext()) as manager:
        manager.load(model)
    assert model.a.equal(exact.to(dtype))


@pytest.mark.parametrize("untied", [None, "a", "b", "c"])
def test_weights_that_are_tied_now_must_have_been_equal(tmp_path, untied):
    model = nn.Module()
    model.a = model.b = model.c = nn.Parameter(torch.zeros(2))
    saved(tmp_path, {name: torch.full((2,), 2.0 if name == untied else 1.0) for name in "abc"})
    with CheckpointManager(tmp_path, ParallelContext()) as manager:
        if untied is None:
            manager.load(model)
            assert model.a.tolist() == [1, 1]
            return
        with pytest.raises(CheckpointError) as error:
            manager.load(model)
    other = "c" if untied == "c" else "b"
    assert (
        f"a, b, c are one tied tensor in this model, but a and {other} have different values in the checkpoint. The checkpoint was saved from a model without this tie. Untie the parameters to load the checkpoint."
    ) in str(error.value)
    assert model.a.tolist() == [0, 0]

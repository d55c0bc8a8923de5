"""A model and a checkpoint matched by name: what is used, what is missing, what does not fit, by the whole message."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from colonnade.checkpoint import state
from colonnade.checkpoint.manifest import LayoutRecord, Manifest, TensorRecord
from colonnade.checkpoint.state import LoadPlan
from colonnade.errors import CheckpointError
from colonnade.parallel.flat import MASTER


def record(label: str, *names: str, shape: tuple[int, ...] = (2,), dtype: str = "F32", state: str = "") -> TensorRecord:
    return TensorRecord(label, state, names or (label,), shape, dtype, ())


def here(label: str, *names: str, shape: tuple[int, ...] = (2,), dtype: torch.dtype = torch.float32) -> Any:
    return SimpleNamespace(label=label, names=names or (label,), shape=shape, local=torch.zeros(shape, dtype=dtype))


def plan(tensors: list[Any], *records: TensorRecord) -> LoadPlan:
    return LoadPlan(tensors, Manifest(1, 0.0, LayoutRecord(1, ()), (), (), records, None, ()))


def test_every_name_of_either_side_finds_the_other():
    tensors = [here("a"), here("new", "b", "c"), here("d", "other")]
    made = plan(tensors, record("a"), record("old", "c"), record("x", "d"), record("a", state="exp_avg"))
    assert [made.record_of(tensor).label for tensor in tensors] == ["a", "old", "x"]
    assert made.note() == {"used": ["a", "old", "x"], "missing": [], "mismatched": []}
    made.check([made.note()], "it")


def test_what_does_not_fit_is_listed_from_all_ranks():
    tensors = [here("a", shape=(3,)), here("b", dtype=torch.float64), here("c"), here("d", "e", "e2")]
    made = plan(tensors, record("a"), record("b"), record("left", "f", "g"), record("alone"))
    note = made.note()
    assert note == {
        "used": ["a", "b"],
        "missing": ["c", "e"],
        "mismatched": ["a: F32 [2] in the checkpoint, F32 [3] here", "b: F32 [2] in the checkpoint, F64 [2] here"],
    }
    with pytest.raises(CheckpointError) as error:
        made.check([note, {"used": ["alone"], "missing": ["z", "c"], "mismatched": []}], "step 3")
    assert str(error.value).startswith(
        "step 3 does not fit this model:\n"
        "  missing in the checkpoint (3): c, e, z\n"
        "  in the checkpoint, but not in the model (1): f\n"
        "  of another shape or type (2): a: F32 [2] in the checkpoint, F32 [3] here, "
        "b: F32 [2] in the checkpoint, F64 [2] here\n"
        "Build the model that was saved (names, sizes and types are in the manifest), or load another checkpoint."
    )


def test_a_master_is_read_in_the_place_of_its_rounded_weight(monkeypatch):
    monkeypatch.setattr(state, "read_local", lambda reader, tensor, found: found)
    values: Any = SimpleNamespace(own_buffer=lambda label: "own" if label == "buffer" else None)
    rounded, master = record("a", dtype="BF16"), record("a", state=MASTER)
    for dtype, expected in ((torch.float32, master), (torch.bfloat16, rounded)):
        made = plan([here("a", dtype=dtype)], rounded, master)
        assert made.note()["mismatched"] == []
        assert made.read_tensors(None, values) == [expected]  # type: ignore[arg-type]
    made = plan([here("a", shape=(3,))], rounded, master)
    assert made.note()["mismatched"] == ["a: BF16 [2] in the checkpoint, F32 [3] here"]
    assert plan([here("buffer")], record("buffer")).read_tensors(None, values) == ["own"]  # type: ignore[arg-type]


def test_weights_that_are_tied_now_must_have_been_equal(monkeypatch):
    stored = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)}
    monkeypatch.setattr(state, "read_local", lambda reader, tensor, found: stored[found.label])
    values: Any = SimpleNamespace(own_buffer=lambda label: None)
    tensor = here("a", "a", "b", "c")
    for untied in (None, "a", "b", "c"):
        if untied is not None:
            stored = {name: torch.full((2,), 2.0 if name == untied else 1.0) for name in "abc"}
        made = plan([tensor], record("a"), record("b"), record("c"))
        assert made.note()["used"] == ["a", "b", "c"]
        if untied is None:
            assert made.read_tensors(None, values)[0] is stored["a"]  # type: ignore[arg-type]
            continue
        with pytest.raises(CheckpointError) as error:
            made.read_tensors(None, values)  # type: ignore[arg-type]
        other = "c" if untied == "c" else "b"
        assert str(error.value).startswith(
            f"a, b, c are one tensor in the model, and a and {other} have different values in the checkpoint: "
            "the model that was saved had not tied them"
        )


def test_what_was_found_is_set_in_place():
    tensors = [here("a"), here("b")]
    memory = [tensor.local for tensor in tensors]
    plan(tensors, record("a"), record("b")).set_tensors([torch.ones(2), torch.full((2,), 2.0)])
    assert [each.tolist() for each in memory] == [[1, 1], [2, 2]]

"""Boxes of tensors out of safetensors files, and files and folders that are not what they say."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from colonnade.checkpoint import tensor_files
from colonnade.checkpoint.full_weights import INDEX, tensors_in
from colonnade.checkpoint.tensor_files import stored_tensors
from colonnade.errors import CheckpointError
from colonnade.parallel.boxes import Box
from colonnade.testing import in_double

TENSORS = {
    "four": torch.arange(7 * 5 * 6 * 3.0).reshape(7, 5, 6, 3),
    "rows": torch.arange(40 * 64.0).reshape(40, 64).bfloat16(),
    "scalar": torch.tensor(3, dtype=torch.int8),
    "empty": torch.zeros(0, 3),
}


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("slices") / "x.safetensors"
    save_file(TENSORS, path)
    return path


def test_a_file_is_read_as_it_is_where_new_tensors_become_double(file):
    with in_double():
        found = stored_tensors(file)["four"].read()
    assert found.dtype is torch.float32
    assert found.equal(TENSORS["four"])


@given(st.data())
def test_any_box_is_read(file, data):
    """Whatever lies together: in one piece, by rows, or by way of scratch memory."""
    key = data.draw(st.sampled_from(list(TENSORS)))
    whole = TENSORS[key]
    starts = [data.draw(st.integers(0, max(size - 1, 0))) for size in whole.shape]
    shape = [data.draw(st.integers(0, size - at)) for size, at in zip(whole.shape, starts, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_files, "_LONG_RUN", data.draw(st.sampled_from([1, 1 << 16])))
        patch.setattr(tensor_files, "_SCRATCH", data.draw(st.sampled_from([100, 200, 1 << 23])))
        stored = stored_tensors(file)[key]
        expected = whole[tuple(slice(at, at + size) for at, size in zip(starts, shape, strict=True))]
        box = Box(tuple(starts), tuple(shape))
        assert stored.read(box).equal(expected)
        apart = torch.empty_like(expected).flatten().repeat(2)[::2]  # not contiguous
        for target in (torch.full(shape, 7.0, dtype=torch.float64), apart.view(shape)):
            stored.read_into(target, box)
            assert target.equal(expected.to(target.dtype))


def test_a_file_system_may_give_less_than_was_asked_for(file, monkeypatch):
    def few(descriptor, memories, start, preadv=os.preadv):
        return preadv(descriptor, [memory[:100] for memory in memories], start)

    monkeypatch.setattr(os, "preadv", few)
    for key, stored in stored_tensors(file).items():
        assert stored.read().equal(TENSORS[key])


def test_what_was_read_is_let_go(file, opened):
    for stored in stored_tensors(file).values():
        stored.read()
    assert opened() == []


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (
            {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 9]}},
            r"a has dtype F32 and shape \[2\], but the table gives it the bytes 0",
        ),
        ({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}, "bytes 0 to 12"),
        ({"a": {"dtype": "F32", "shape": [-1, -1, 2], "data_offsets": [0, 8]}}, "shape"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [-1, 7]}}, "bytes -1 to 7"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]}}, "bytes 1 to 9"),
        ({"a": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}}, "has the unknown type F99"),
        ({"a": {"dtype": "F32"}}, "shape"),
        ([], "cannot be read"),
    ],
)
def test_a_table_that_does_not_fit_its_file_is_refused(tmp_path, table, said):
    text = json.dumps(table).encode()
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(CheckpointError, match=said):
        stored_tensors(tmp_path / "x.safetensors")


def test_what_is_no_folder_of_weights_is_refused(tmp_path, file):
    with pytest.raises(CheckpointError, match=r"is neither a folder nor a file.*hf download"):
        tensors_in(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="has no weights"):
        tensors_in(tmp_path)
    (tmp_path / "x.safetensors").write_bytes(b"\xff" * 16)
    with pytest.raises(CheckpointError, match="a table of 18446744073709551615 bytes in a file of 16"):
        tensors_in(tmp_path)
    beside = r"refers to '.*', but the folder has no file"
    elsewhere = {"a": f"../{tmp_path.name}/x.safetensors"}
    for names, said in (("x", "is not an index of weights"), (elsewhere, beside), ({"a": "y.safetensors"}, beside)):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": names}))
        with pytest.raises(CheckpointError, match=said):
            tensors_in(tmp_path)
    assert set(tensors_in(file)) == set(tensors_in(file.parent)) == set(TENSORS)


def test_a_pickle_is_read_only_where_it_is_trusted(tmp_path):
    value = torch.arange(6, dtype=torch.int16).reshape(2, 3)
    torch.save({"a": value, "step": 3}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="is a pickle, which can run code when it is read"):
        tensors_in(tmp_path)
    found = tensors_in(tmp_path, trust=True)
    assert found.keys() == {"a"}
    stored = found["a"]
    assert str(tmp_path) in Path("/proc/self/maps").read_text()  # its bytes are read when they are asked for
    assert (stored.dtype, stored.shape, str(stored)) == (torch.int16, (2, 3), "a in pytorch_model.bin")
    assert stored.read().equal(value)
    assert stored.read(Box((0, 1), (2, 2))).equal(value[:, 1:])
    target = torch.zeros(1, 3)
    stored.read_into(target, Box((1, 0), (1, 3)))
    assert target.equal(value[1:].float())


class Explodes:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return pytest.fail, ("it was unpickled",)


def test_even_a_trusted_pickle_runs_no_code(tmp_path):
    torch.save({"a": torch.ones(2), "b": Explodes()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        tensors_in(tmp_path, trust=True)


def test_of_several_kinds_of_files_the_whole_one_is_taken_and_what_was_interrupted_is_said(tmp_path, file):
    (tmp_path / ".old-1").mkdir()
    with pytest.raises(CheckpointError) as error:
        tensors_in(tmp_path)
    assert str(error.value).startswith(
        f"{tmp_path} has no weights: it has neither model.safetensors nor {INDEX}. A save was killed while it replaced the weights. Save again, or move the files in {tmp_path / '.old-1'} back"
    )
    for name in ("a", "b"):
        save_file({name: torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match="has no weights"):
        tensors_in(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}))
    assert tensors_in(tmp_path).keys() == {"a", "b"}
    save_file({"all": torch.ones(1)}, tmp_path / "model.safetensors")
    assert tensors_in(tmp_path).keys() == {"all"}


@pytest.mark.parametrize("length", [0, 1, 9, 1 << 40])
def test_a_table_is_as_long_as_it_can_be_at_most(tmp_path, length):
    (tmp_path / "x.safetensors").write_bytes(length.to_bytes(8, "little") + b"{}      ")
    with pytest.raises(CheckpointError, match=f"a table of {length} bytes in a file of 16"):
        stored_tensors(tmp_path / "x.safetensors")
    for fits in (2, 8):
        (tmp_path / "x.safetensors").write_bytes(fits.to_bytes(8, "little") + b"{}      ")
        assert stored_tensors(tmp_path / "x.safetensors") == {}

"""Boxes of tensors out of safetensors files, and files and folders that are not what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from colonnade.checkpoint.format import slices
from colonnade.checkpoint.format.boxes import Box
from colonnade.checkpoint.format.slices import INDEX, stored_tensors, tensors_in
from colonnade.errors import CheckpointError

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


@given(st.data())
def test_any_box_is_read(file, data):
    """Whatever lies together: in one piece, by rows, or by way of scratch memory."""
    key = data.draw(st.sampled_from(list(TENSORS)))
    whole = TENSORS[key]
    starts = [data.draw(st.integers(0, max(size - 1, 0))) for size in whole.shape]
    shape = [data.draw(st.integers(0, size - at)) for size, at in zip(whole.shape, starts, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slices, "_LONG_RUN", data.draw(st.sampled_from([1, 1 << 16])))
        patch.setattr(slices, "_SCRATCH", data.draw(st.sampled_from([100, 1 << 23])))
        stored = stored_tensors(file)[key]
        expected = whole[tuple(slice(at, at + size) for at, size in zip(starts, shape, strict=True))]
        box = Box(tuple(starts), tuple(shape))
        assert stored.read(box).equal(expected)
        wide = torch.full(shape, 7.0, dtype=torch.float64)
        stored.read_into(wide, box)
        assert wide.equal(expected.double())


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (
            {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 9]}},
            r"a, of F32 and shape \[2\], is said to be bytes 0",
        ),
        ({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}, "bytes 0 to 12"),
        ({"a": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}}, "shape"),
        ({"a": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}}, "has the type F99"),
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
    for names, said in (("x", "is no index of weights"), ({"a": "../x.safetensors"}, "which is no file beside it")):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": names}))
        with pytest.raises(CheckpointError, match=said):
            tensors_in(tmp_path)
    assert set(tensors_in(file)) == set(tensors_in(file.parent)) == set(TENSORS)

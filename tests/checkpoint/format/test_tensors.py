"""Files of tensors: safetensors reads them, bits are kept for every type, and the hash is that of the file."""

from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file

from colonnade.checkpoint import tensor_files as module
from colonnade.checkpoint.manifest import (
    WIDTHS,
    Cut,
    Damaged,
    FileRecord,
    LayoutRecord,
    Manifest,
    TensorPart,
    TensorRecord,
    check_tiled,
)
from colonnade.checkpoint.tensor_files import _NAMES, FileEntry, TensorReader, raw_bytes, write_tensors
from colonnade.errors import CheckpointError
from colonnade.parallel.boxes import Box, full_box

TYPES = list(_NAMES)


def some(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random bits of a type."""
    width = WIDTHS[_NAMES[dtype]]
    size = (torch.Size(shape).numel() * width,)
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, size, dtype=torch.uint8)
    return bits.view(dtype).reshape(shape)


def test_every_type_is_read_by_safetensors_with_the_same_bits(tmp_path):
    tensors = {f"{at}": some(dtype, 3, 5) for at, dtype in enumerate(TYPES)}
    tensors |= {"scalar": torch.tensor(1.5), "empty": torch.zeros(0, 4), "turned": some(torch.float32, 4, 6).t()}
    tensors |= {"conjugate": torch.tensor([1 + 2j]).conj(), "é/strange key#1": torch.ones(1)}
    record = write_tensors(
        tmp_path / "rank-00000.safetensors", [FileEntry.of(key, value) for key, value in tensors.items()]
    )
    content = (tmp_path / record.name).read_bytes()
    assert (record.size, record.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    found = load_file(tmp_path / record.name)
    assert set(found) == set(tensors)
    assert found["conjugate"].item() == 1 - 2j
    for key, value in tensors.items():
        assert found[key].dtype is value.dtype, key
        assert found[key].shape == value.shape, key
        assert bytes(raw_bytes(found[key])) == bytes(raw_bytes(value)), key


def test_elements_are_aligned(tmp_path):
    tensors = [
        FileEntry.of("a", some(torch.uint8, 3)),
        FileEntry.of("b", some(torch.float64, 2)),
        FileEntry.of("c", some(torch.bfloat16, 1)),
    ]
    write_tensors(tmp_path / "x.safetensors", tensors)
    content = (tmp_path / "x.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    table = json.loads(content[8 : 8 + length])
    assert table.pop("__metadata__") == {"format": "pt"}  # which transformers asks for
    for place in table.values():
        assert place["data_offsets"][0] % WIDTHS[place["dtype"]] == 0


def test_a_thread_may_rest_after_each_chunk(tmp_path, monkeypatch):
    rests: list[int] = []
    entries = [FileEntry.of("a", some(torch.uint8, 200)), FileEntry.of("b", some(torch.uint8, 300))]
    for chunk, pieces in ((1 << 20, 3), (100, 2 + 2 + 3)):  # of a header of 152 bytes, and of each
        monkeypatch.setattr(module, "_CHUNK", chunk)
        file = tmp_path / f"{chunk}.safetensors"
        write_tensors(file, entries, lambda: rests.append(1))
        assert len(rests) == pieces
        rests.clear()
        assert bytes(raw_bytes(load_file(file)["b"])) == bytes(raw_bytes(entries[1].read()))


def test_a_table_that_no_reader_would_take_is_not_written(tmp_path, monkeypatch):
    entries = [FileEntry.of("a", torch.ones(2))]
    write_tensors(tmp_path / "a", entries)
    length = int.from_bytes((tmp_path / "a").read_bytes()[:8], "little")
    monkeypatch.setattr(module, "_LONGEST_HEADER", length)
    write_tensors(tmp_path / "b", entries)
    monkeypatch.setattr(module, "_LONGEST_HEADER", length - 1)
    with pytest.raises(
        CheckpointError, match=f"the table of 1 tensors takes {length} bytes, but readers accept at most {length - 1}"
    ):
        write_tensors(tmp_path / "c", entries)


def manifest_of(tensors: list[TensorRecord], cuts: list[Cut], names: list[str]) -> Manifest:
    files = tuple(FileRecord(name, 1 << 20, "") for name in names)
    return Manifest(1, 0.0, LayoutRecord(1, ()), files, tuple(cuts), tuple(tensors), None, ())


@pytest.mark.slow
@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_box_is_read_from_any_rows_or_ranges(tmp_path_factory, data):
    """A tensor in parts side by side, each cut by rows or, in either order of the dimensions, by elements."""
    shape, whole, folder = (7, 5), torch.arange(35).reshape(7, 5), tmp_path_factory.mktemp("boxes")
    files, parts, cuts = ["a.safetensors", "b.safetensors", "c.safetensors"], [], []
    entries: dict[str, list[FileEntry]] = {name: [] for name in files}
    for left, right in itertools.pairwise(sorted({0, 5, data.draw(st.integers(0, 5))})):
        order = data.draw(st.sampled_from([None, (0, 1), (1, 0)]))
        column = whole[:, left:right]
        values = column if order is None else column.permute(order).flatten()
        stops = sorted({len(values), *data.draw(st.lists(st.integers(1, len(values)), max_size=2))})
        for at, (start, stop) in enumerate(itertools.pairwise([0, *stops])):
            entries[files[at]].append(FileEntry.of(f"part {left}", values[start:stop]))
        parts.append(TensorPart((0, left), (7, right - left), order, f"part {left}", len(cuts)))
        cuts.append(Cut(tuple(stops), tuple(range(len(stops)))))
    for name in files:
        write_tensors(folder / name, entries[name])
    record = TensorRecord("w", "", ("w",), shape, "I64", tuple(parts))
    check_tiled(record, cuts)
    start = [data.draw(st.integers(0, size)) for size in shape]
    box = Box(tuple(start), tuple(data.draw(st.integers(0, size - at)) for at, size in zip(start, shape, strict=True)))
    found = TensorReader(folder, manifest_of([record], cuts, files)).new(box, record)
    assert torch.equal(found, whole[box.slices_in(full_box(shape))])


def test_a_file_that_does_not_hold_what_the_manifest_says_is_damaged(tmp_path):
    write_tensors(tmp_path / "x.safetensors", [FileEntry.of("a", torch.ones(2, 2))])
    for key, shape, dtype, file in [
        ("a", (4,), "F32", 0),
        ("a", (2, 2), "I32", 0),
        ("b", (2, 2), "F32", 0),
        ("a", (2, 2), "F32", 1),
    ]:
        part = TensorPart((0,) * len(shape), shape, None, key, 0)
        record = TensorRecord("w", "", ("w",), shape, dtype, (part,))
        manifest = manifest_of([record], [Cut((shape[0],), (file,))], ["x.safetensors", "y.safetensors"])
        with pytest.raises(Damaged):
            TensorReader(tmp_path, manifest).full(record)


def test_two_tensors_of_one_name_are_found_when_they_are_written(tmp_path):
    with pytest.raises((CheckpointError, SafetensorError)):
        write_tensors(tmp_path / "x.safetensors", [FileEntry.of("a", torch.ones(2)), FileEntry.of("a", torch.ones(2))])


@pytest.mark.parametrize(
    "content",
    [b"", b"\x80\x04K\x01.", (2**63).to_bytes(8, "little") + b"{}", (1 << 40).to_bytes(8, "little"), b"\0" * 64],
    ids=["empty", "pickle", "header of 2^63", "header of 2^40", "zeros"],
)
def test_crafted_files_are_refused(tmp_path, content):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(Damaged):
        TensorReader(tmp_path, manifest_of([], [], [])).entry("x.safetensors", "a")


@pytest.mark.slow
def test_numpy_is_not_needed(tmp_path):
    code = (
        "import sys; sys.modules['numpy'] = None\n"
        "import torch; from torch import nn\n"
        "from colonnade.checkpoint import CheckpointManager\n"
        "from colonnade.context.parallel_context import ParallelContext\n"
        "model = nn.Linear(3, 2).bfloat16(); before = model.weight.clone()\n"
        "manager = CheckpointManager(sys.argv[1], ParallelContext()); manager.save(1, model)\n"
        "nn.init.zeros_(model.weight); manager.load(model); assert torch.equal(model.weight, before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr

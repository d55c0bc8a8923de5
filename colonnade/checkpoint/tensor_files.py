"""Files of tensors in the safetensors format. They are written and hashed in one pass, and read box by box.

The writer of the safetensors package is not used: it returns no hash, does not sync the file, and holds all tensors in memory.
Each written file is opened with that package once, to make sure that other programs can read it.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from colonnade.checkpoint.manifest import WIDTHS, Damaged, FileRecord, Manifest, StoredBox, TensorRecord
from colonnade.checkpoint.storage import fault_point, new_file, write_all
from colonnade.errors import CheckpointError, listed
from colonnade.parallel.boxes import Box, full_box, moved, places_of
from colonnade.parallel.whole import LocalTensor

# --- Types, entries and bytes ---


_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
}
_TYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True)
class FileEntry:
    """A tensor to write to a file. Its size is known in advance, but its content is read only when it is written."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @classmethod
    def of(cls, key: str, tensor: Tensor) -> FileEntry:
        """Make the entry of a tensor that is in memory."""
        return cls(key, type_name(tensor, key), tuple(tensor.shape), lambda: tensor)

    @property
    def size(self) -> int:
        """The size of the tensor in bytes."""
        return prod(self.shape) * WIDTHS[self.dtype]


def type_name(tensor: Tensor, what: str) -> str:
    """The safetensors name of the tensor's dtype; raises for tensors that cannot be stored."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise CheckpointError(
            f"{what} is a {tensor.device.type} tensor with layout {tensor.layout}. Only dense tensors in memory can "
            "be saved.",
            code="C085",
        )
    return name_of(tensor.dtype, what)


def dtype_of(record: TensorRecord) -> torch.dtype:
    """The torch dtype of a saved tensor."""
    return _TYPES[record.dtype]


def memory_for(shape: Sequence[int], dtype: torch.dtype, pinned: bool = False) -> Tensor:
    """Allocate uninitialized host memory of exactly this dtype. (Inside `in_double()`, a plain `torch.empty` would have a
    wider dtype.)"""
    with torch._C.DisableTorchFunction():
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=pinned, device="cpu")


def dtype_named(name: str) -> torch.dtype:
    """The torch dtype of a safetensors name."""
    return _TYPES[name]


def name_of(dtype: torch.dtype, what: str = "the dtype") -> str:
    """The safetensors name of a torch dtype."""
    if dtype not in _NAMES:
        known = listed(str(dtype).removeprefix("torch.") for dtype in _NAMES)
        raise CheckpointError(
            f"{what} has dtype {dtype}, which a checkpoint cannot store; allowed are {known}", code="C085"
        )
    return _NAMES[dtype]


def in_file_order(entries: Iterable[FileEntry]) -> list[FileEntry]:
    """Sort entries in the order in which a file has them: the widest elements first, so that all entries are aligned."""
    return sorted(entries, key=lambda entry: (-WIDTHS[entry.dtype], entry.key))


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor's elements in row-major order. A copy is made only if the tensor is on a device or not contiguous."""
    plain = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
    if not plain.numel():
        return memoryview(b"")
    # By address, because a view through numpy would make numpy a requirement.
    content = (ctypes.c_ubyte * (plain.numel() * plain.element_size())).from_address(plain.data_ptr())
    content.owner = plain  # type: ignore[attr-defined]  # keeps the memory alive as long as the view
    return memoryview(content).cast("B")


# --- Reading: the table of a safetensors file, and boxes of its tensors read directly into their target memory ---


_LONGEST_HEADER = 100_000_000
_SCRATCH = 1 << 23
_LONG_RUN = 1 << 16
"""Contiguous runs of at least this many bytes are read one by one; shorter runs by reading full rows and copying out of them."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file, whose bytes start at offset `start`."""

    file: Path
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    def __str__(self) -> str:
        return f"{self.key} in {self.file.name}"

    def read(self, box: Box | None = None) -> Tensor:
        """The elements of a box (by default all) as a new tensor."""
        box = full_box(self.shape) if box is None else box
        target = memory_for(box.shape, self.dtype)
        self.read_into(target, box)
        return target

    def read_into(self, target: Tensor, box: Box) -> None:
        """Read the elements of the box into `target`, with at most 8 MiB or one copy of the box as extra memory."""
        if not target.numel():
            return
        # Bytes are read directly into contiguous CPU memory of the same dtype; any other target gets a copy.
        if target.device.type != "cpu" or target.dtype != self.dtype or not target.is_contiguous():
            with torch.no_grad():
                target.copy_(self.read(box))
            return
        descriptor = os.open(self.file, os.O_RDONLY)
        try:
            self._read(descriptor, _memory(target), box)
        finally:
            os.close(descriptor)

    def _read(self, descriptor: int, memory: memoryview, box: Box) -> None:
        width, dims = self.dtype.itemsize, len(self.shape)
        # After dimension `split_dim` the box spans the full tensor, so each row of `split_dim` has one contiguous run of the box.
        split_dim = next((dim for dim in reversed(range(dims)) if box.shape[dim] != self.shape[dim]), 0)
        strides = [width * prod(self.shape[dim + 1 :]) for dim in range(dims)]
        first = self.start + sum(at * stride for at, stride in zip(box.offset, strides, strict=True))
        run = prod(box.shape[split_dim:]) * width
        if not split_dim:
            self._fill(descriptor, memory, first)
            return
        pitch, rows = strides[split_dim - 1], box.shape[split_dim - 1]
        for number, outer in enumerate(itertools.product(*map(range, box.shape[: split_dim - 1]))):
            begin = first + sum(at * stride for at, stride in zip(outer, strides, strict=False))
            part = memory[number * rows * run :][: rows * run]
            if run >= _LONG_RUN:
                for row in range(rows):
                    self._fill(descriptor, part[row * run :][:run], begin + row * pitch)
                continue
            # Short runs, one every `pitch` bytes: as many full rows as fit into the scratch memory are read by one call.
            target = torch.frombuffer(part, dtype=torch.uint8).view(-1, run)
            most = max(1, _SCRATCH // pitch)
            scratch = torch.empty(most * pitch, dtype=torch.uint8, device="cpu")
            for row in range(0, rows, most):
                count = min(most, rows - row)
                self._fill(descriptor, _memory(scratch)[: (count - 1) * pitch + run], begin + row * pitch)
                target[row : row + count] = scratch[: count * pitch].view(count, pitch)[:, :run]

    def _fill(self, descriptor: int, memory: memoryview, start: int) -> None:
        while len(memory):
            count = os.preadv(descriptor, [memory], start)
            if not count:
                raise CheckpointError(
                    f"{self.file} ends before the last byte of {self.key}. The file was changed while it was read.",
                    code="C081",
                )
            memory, start = memory[count:], start + count


def stored_tensors(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, by name. Raises if the header of the file does not match its size."""
    try:
        with open(file, "rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            length = int.from_bytes(opened.read(8), "little")
            if not 2 <= length <= min(_LONGEST_HEADER, size - 8):
                raise ValueError(f"a table of {length} bytes in a file of {size}")
            table: dict[str, Any] = json.loads(opened.read(length))
        table.pop("__metadata__", None)
        return {key: _stored(file, key, entry, 8 + length, size) for key, entry in table.items()}
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read as a safetensors file: {error}", code="C081") from error


def _stored(file: Path, key: str, entry: dict[str, Any], begin: int, size: int) -> StoredTensor:
    shape, (start, stop) = tuple(map(int, entry["shape"])), map(int, entry["data_offsets"])
    if entry["dtype"] not in WIDTHS:
        raise ValueError(f"{key} has the unknown type {entry['dtype']}; allowed are {', '.join(WIDTHS)}")
    right = stop - start == prod(shape) * WIDTHS[entry["dtype"]]
    if any(dim < 0 for dim in shape) or not (0 <= start <= stop <= size - begin) or not right:
        raise ValueError(
            f"{key} has dtype {entry['dtype']} and shape {list(shape)}, but the table gives it the bytes {start} to "
            f"{stop}. This range has a wrong size or is outside of the file."
        )
    return StoredTensor(file, key, dtype_named(entry["dtype"]), shape, begin + start)


def _memory(tensor: Tensor) -> memoryview:
    """A writable view of the memory of a contiguous tensor, which must outlive the view."""
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")


_CHUNK = 1 << 23


def write_tensors(
    path: Path, entries: Iterable[FileEntry], after_chunk: Callable[[], None] = lambda: None
) -> FileRecord:
    """Write and sync a new file, and check that it opens.

    The hash is computed from the bytes as they are written. `after_chunk` is called after each chunk of 8 MiB, where a background
    thread can rest.
    """
    # The table of entries is written before the data: the sizes of all entries are already known.
    ordered = in_file_order(entries)
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # some readers require it
    start = 0
    for entry in ordered:
        stop = start + entry.size
        table[entry.key] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _LONGEST_HEADER:
        raise CheckpointError(
            f"the table of {len(ordered)} tensors takes {len(text)} bytes, but readers accept at most {_LONGEST_HEADER}",
            code="C081",
        )
    header = memoryview(len(text).to_bytes(8, "little") + text)

    digest, size = hashlib.sha256(), 0
    with new_file(path) as file:
        for content in chain([header], (raw_bytes(entry.read()) for entry in ordered)):
            for at in range(0, len(content), _CHUNK):
                chunk = content[at : at + _CHUNK]
                digest.update(chunk)
                write_all(file, chunk)
                after_chunk()
            size += len(content)
            fault_point("tensor written")
        fault_point("file written")
    # The safetensors package raises if the table does not match the bytes.
    with safe_open(str(path), framework="pt") as opened:
        if len(opened.keys()) != len(ordered):
            raise CheckpointError(
                f"{path} has {len(opened.keys())} tensors, but {len(ordered)} were written", code="C081"
            )
    fault_point("file synced")
    return FileRecord(path.name, size, digest.hexdigest())


class TensorReader:
    """Reads boxes of tensors from the files of a checkpoint; the header of each file is read on first use."""

    def __init__(self, checkpoint: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        self._checkpoint = checkpoint
        self._tables: dict[str, dict[str, StoredTensor]] = {}

    def fill(self, target: Tensor, box: Box, record: TensorRecord) -> None:
        """Read the elements of `box` into `target`, from all stored boxes that overlap it."""
        for part in record.parts:
            wanted = box.shared_with(part.box)
            for stored in self.manifest.stored_boxes(part, wanted) if wanted is not None else ():
                shared = box.shared_with(stored.box)
                if shared is not None:
                    self._read(target[shared.slices_in(box)], stored, shared, record.dtype)

    def new(self, box: Box, record: TensorRecord) -> Tensor:
        """The elements of `box` as a new tensor."""
        target = memory_for(box.shape, dtype_of(record))
        self.fill(target, box, record)
        return target

    def local(self, tensor: LocalTensor, record: TensorRecord) -> Tensor:
        """This rank's elements of a saved tensor, as a new tensor with the shape of the local tensor."""
        values = memory_for(tensor.local.shape, dtype_of(record))
        for box, view in tensor.pieces(values):
            self.fill(view, box, record)
        return values

    def full(self, record: TensorRecord) -> Tensor:
        """All elements of a saved tensor."""
        return self.new(full_box(record.shape), record)

    def entry(self, file: str, key: str) -> Tensor:
        """Read a complete entry of a file, of any shape."""
        with _damaged_if_broken(file):
            return self._stored(file, key).read()

    def _read(self, target: Tensor, stored: StoredBox, box: Box, dtype: str) -> None:
        """Read the elements of `box`, a box inside the stored one, into `target`."""
        with _damaged_if_broken(stored.file):
            found = self._stored(stored.file, stored.key)
            # A file's own table is covered only by the file's hash, which a load may skip (`verify=False`).
            if (found.shape, name_of(found.dtype)) != (stored.shape, dtype):
                raise Damaged(
                    f"{stored.file}: {stored.key} is {name_of(found.dtype)} of shape {list(found.shape)}, expected {dtype} of "
                    f"{list(stored.shape)}"
                )
            if stored.order is None:
                found.read_into(target, moved(box, stored.box, full_box(stored.shape)))
                return
            flat = found.read(Box((stored.first,), (stored.box.numel,)))
        # A range of elements is stored in the memory order of the tensor it was saved from (for example channels last).
        ordered = flat.view([stored.box.shape[dim] for dim in stored.order])
        with torch.no_grad():
            target.copy_(ordered.permute(places_of(stored.order))[box.slices_in(stored.box)])

    def _stored(self, file: str, key: str) -> StoredTensor:
        if file not in self._tables:
            self._tables[file] = stored_tensors(self._checkpoint / file)
        return self._tables[file][key]


@contextmanager
def _damaged_if_broken(file: str) -> Iterator[None]:
    """Raise any error of reading the file as Damaged."""
    try:
        yield
    except Damaged:
        raise
    except (CheckpointError, KeyError, OSError) as error:
        raise Damaged(f"{file} cannot be read: {error}") from error

"""Files of tensors in the safetensors format: written in one pass that also hashes, read by slices.

The safetensors package reads them, here and anywhere else. They are written here, because its own writer gives
back neither a hash nor a file that is known to be on disk, and holds all tensors in memory as bytes.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from colonnade.checkpoint.fault import fault_point
from colonnade.checkpoint.format.boxes import Box, places_of, whole_box
from colonnade.checkpoint.format.manifest import WIDTHS, Block, FileRecord, Manifest, TensorRecord
from colonnade.checkpoint.format.records import Damaged
from colonnade.errors import CheckpointError, listed

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
_CHUNK = 1 << 23
_LONGEST_HEADER = 100_000_000


@dataclass(frozen=True)
class Entry:
    """A tensor to write: its place is known before its content, which is asked for when its turn comes."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @classmethod
    def of(cls, key: str, tensor: Tensor) -> Entry:
        """The entry of a tensor that is there already."""
        return cls(key, type_name(tensor, key), tuple(tensor.shape), lambda: tensor)

    @property
    def size(self) -> int:
        """Its bytes."""
        return prod(self.shape) * WIDTHS[self.dtype]


def type_name(tensor: Tensor, what: str) -> str:
    """The format's name for the tensor's type; refuses what the format cannot hold."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise CheckpointError(
            f"{what} is a {tensor.device.type} tensor of {tensor.layout}; only dense ones can be saved"
        )
    if tensor.dtype not in _NAMES:
        known = listed(str(dtype).removeprefix("torch.") for dtype in _NAMES)
        raise CheckpointError(f"{what} is {tensor.dtype}, which a checkpoint cannot hold; allowed are {known}")
    return _NAMES[tensor.dtype]


def dtype_of(record: TensorRecord) -> torch.dtype:
    """Torch's type of a saved tensor."""
    return _TYPES[record.dtype]


def write_tensors(path: Path, entries: Iterable[Entry], rest: Callable[[], None] = lambda: None) -> FileRecord:
    """Write a new file, see it on disk and see that it opens; returns its size and hash, of the bytes on their way.

    `rest` is called after each chunk: a thread that has time makes room for others there.
    """
    # The largest elements first, so that all of them are aligned in the file.
    ordered = sorted(entries, key=lambda entry: (-WIDTHS[entry.dtype], entry.key))
    digest, size = hashlib.sha256(), 0
    with open(path, "xb", buffering=0) as file:
        for content in chain([_header(ordered)], (raw_bytes(entry.read()) for entry in ordered)):
            for start in range(0, len(content), _CHUNK):
                chunk = content[start : start + _CHUNK]
                digest.update(chunk)
                while len(chunk):
                    chunk = chunk[file.write(chunk) :]
                rest()
            size += len(content)
            fault_point("tensor written")
        fault_point("file written")
        os.fsync(file.fileno())
    with safe_open(str(path), framework="pt") as file:  # refuses a table that does not match the bytes
        if len(file.keys()) != len(ordered):
            raise CheckpointError(f"{path} has {len(file.keys())} tensors, not the {len(ordered)} that were written")
    fault_point("file synced")
    return FileRecord(path.name, size, digest.hexdigest())


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor's elements in row order; a copy only where they are elsewhere or out of order."""
    plain = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
    if not plain.numel():
        return memoryview(b"")
    # By address, because a view through numpy would make numpy a requirement.
    content = (ctypes.c_ubyte * (plain.numel() * plain.element_size())).from_address(plain.data_ptr())
    content.owner = plain  # type: ignore[attr-defined]  # the memory lives as long as the view
    return memoryview(content).cast("B")


class TensorReader:
    """Reads blocks, and parts of blocks, from the files of one checkpoint; opened when first needed."""

    def __init__(self, checkpoint: Path, manifest: Manifest) -> None:
        self._checkpoint = checkpoint
        self._manifest = manifest
        self._open: dict[str, Any] = {}

    def fill(self, target: Tensor, box: Box, record: TensorRecord) -> None:
        """Copy the elements of `box` out of the blocks that hold some of them into `target`."""
        with torch.no_grad():
            for part in record.parts:
                wanted = box.shared_with(part.box)
                for block in self._manifest.blocks(part, wanted) if wanted is not None else ():
                    shared = box.shared_with(block.box)
                    if shared is not None:
                        target[shared.slices_in(box)].copy_(self._read(block, shared, record.dtype))

    def new(self, box: Box, record: TensorRecord) -> Tensor:
        """The elements of `box` as a new tensor."""
        target = torch.empty(box.shape, dtype=dtype_of(record))
        self.fill(target, box, record)
        return target

    def whole(self, record: TensorRecord) -> Tensor:
        """All elements of a saved tensor."""
        return self.new(whole_box(record.shape), record)

    def entry(self, file: str, key: str) -> Tensor:
        """A whole entry, whatever its shape."""
        with _damaged_if_broken(file):
            return self._file(file).get_tensor(key).clone()

    def _read(self, block: Block, box: Box, dtype: str) -> Tensor:
        """The elements of `box`, which is inside the block."""
        with _damaged_if_broken(block.file):
            found = self._file(block.file).get_slice(block.key)
            there = (tuple(found.get_shape()), found.get_dtype())
            if there != (block.shape, dtype):
                raise Damaged(
                    f"{block.file}: {block.key} is {there[1]} of shape {list(there[0])}, expected {dtype} of "
                    f"{list(block.shape)}"
                )
            if block.order is None:
                values: Tensor = found[box.slices_in(block.box)]
                return values
            flat: Tensor = found[block.first : block.first + block.box.numel]
        ordered = flat.view([block.box.shape[dim] for dim in block.order])
        return ordered.permute(places_of(block.order))[box.slices_in(block.box)]

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = safe_open(str(self._checkpoint / name), framework="pt")
        return self._open[name]


@contextmanager
def _damaged_if_broken(file: str) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise Damaged(f"{file} cannot be read: {error}") from error


def _header(entries: list[Entry]) -> memoryview:
    table, start = {}, 0
    for entry in entries:
        stop = start + entry.size
        table[entry.key] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _LONGEST_HEADER:
        raise CheckpointError(
            f"the table of {len(entries)} tensors takes {len(text)} bytes; {_LONGEST_HEADER} can be read"
        )
    return memoryview(len(text).to_bytes(8, "little") + text)

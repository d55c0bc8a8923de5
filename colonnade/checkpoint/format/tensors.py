"""Files of tensors in the safetensors format: written in one pass that also hashes, read by slices.

The safetensors package reads them, here and anywhere else. They are written here, because its own writer gives
back neither a hash nor a file that is known to be on disk, and holds all tensors in memory as bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from colonnade.checkpoint.fault import fault_point
from colonnade.checkpoint.format.boxes import Box, places_of, whole_box
from colonnade.checkpoint.format.entries import Entry, dtype_of, in_file_order, raw_bytes
from colonnade.checkpoint.format.manifest import Block, FileRecord, Manifest, TensorRecord
from colonnade.checkpoint.format.records import Damaged
from colonnade.errors import CheckpointError

_CHUNK = 1 << 23
_LONGEST_HEADER = 100_000_000


def write_tensors(path: Path, entries: Iterable[Entry], rest: Callable[[], None] = lambda: None) -> FileRecord:
    """Write a new file, see it on disk and see that it opens; returns its size and hash, of the bytes on their way.

    `rest` is called after each chunk: a thread that has time makes room for others there.
    """
    ordered = in_file_order(entries)
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
            raise CheckpointError(
                f"{path} has {len(file.keys())} tensors, not the {len(ordered)} that were written", code="C081"
            )
    fault_point("file synced")
    return FileRecord(path.name, size, digest.hexdigest())


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
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # some readers ask for it
    start = 0
    for entry in entries:
        stop = start + entry.size
        table[entry.key] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _LONGEST_HEADER:
        raise CheckpointError(
            f"the table of {len(entries)} tensors takes {len(text)} bytes; {_LONGEST_HEADER} can be read", code="C081"
        )
    return memoryview(len(text).to_bytes(8, "little") + text)

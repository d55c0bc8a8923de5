"""Files of tensors in the safetensors format: written in one pass that also hashes, read by boxes.

They are written here, because the writer of the safetensors package gives back neither a hash nor a file that is known to
be on disk, and holds all tensors in memory as bytes. Each is opened by that package once, so that it can be read anywhere.
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
from safetensors import safe_open
from torch import Tensor

from colonnade.checkpoint.fault import fault_point
from colonnade.checkpoint.format.boxes import Box, moved, places_of, whole_box
from colonnade.checkpoint.format.entries import Entry, dtype_of, in_file_order, memory_for, name_of, raw_bytes
from colonnade.checkpoint.format.manifest import FileRecord, Manifest, StoredBox, TensorRecord
from colonnade.checkpoint.format.records import Damaged
from colonnade.checkpoint.format.slices import AnyTensor, stored_tensors
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
    """Reads stored boxes, and parts of them, from the files of one checkpoint; their tables when they are first needed."""

    def __init__(self, checkpoint: Path, manifest: Manifest) -> None:
        self._checkpoint = checkpoint
        self._manifest = manifest
        self._tables: dict[str, dict[str, AnyTensor]] = {}

    def fill(self, target: Tensor, box: Box, record: TensorRecord) -> None:
        """Copy the elements of `box` out of the stored boxes that have some of them into `target`."""
        for part in record.parts:
            wanted = box.shared_with(part.box)
            for stored in self._manifest.stored_boxes(part, wanted) if wanted is not None else ():
                shared = box.shared_with(stored.box)
                if shared is not None:
                    self._read(target[shared.slices_in(box)], stored, shared, record.dtype)

    def new(self, box: Box, record: TensorRecord) -> Tensor:
        """The elements of `box` as a new tensor."""
        target = memory_for(box.shape, dtype_of(record))
        self.fill(target, box, record)
        return target

    def whole(self, record: TensorRecord) -> Tensor:
        """All elements of a saved tensor."""
        return self.new(whole_box(record.shape), record)

    def entry(self, file: str, key: str) -> Tensor:
        """A whole entry, whatever its shape."""
        with _damaged_if_broken(file):
            return self._stored(file, key).read()

    def _read(self, target: Tensor, stored: StoredBox, box: Box, dtype: str) -> None:
        """Give `target` the elements of `box`, which is inside the stored one."""
        with _damaged_if_broken(stored.file):
            found = self._stored(stored.file, stored.key)
            if (found.shape, name_of(found.dtype)) != (stored.shape, dtype):
                raise Damaged(
                    f"{stored.file}: {stored.key} is {name_of(found.dtype)} of shape {list(found.shape)}, expected {dtype} of "
                    f"{list(stored.shape)}"
                )
            if stored.order is None:
                found.read_into(target, moved(box, stored.box, whole_box(stored.shape)))
                return
            flat = found.read(Box((stored.first,), (stored.box.numel,)))
        ordered = flat.view([stored.box.shape[dim] for dim in stored.order])
        with torch.no_grad():
            target.copy_(ordered.permute(places_of(stored.order))[box.slices_in(stored.box)])

    def _stored(self, file: str, key: str) -> AnyTensor:
        if file not in self._tables:
            self._tables[file] = stored_tensors(self._checkpoint / file)
        return self._tables[file][key]


@contextmanager
def _damaged_if_broken(file: str) -> Iterator[None]:
    try:
        yield
    except Damaged:
        raise
    except (CheckpointError, KeyError, OSError) as error:
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

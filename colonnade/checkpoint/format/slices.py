"""Files of tensors that others wrote: what is in them, and boxes of tensors read straight into the memory they are for."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from colonnade.checkpoint.format.boxes import Box, whole_box
from colonnade.checkpoint.format.entries import dtype_named, memory_for
from colonnade.checkpoint.format.manifest import WIDTHS
from colonnade.errors import CheckpointError

INDEX = "model.safetensors.index.json"
_LONGEST_HEADER = 100_000_000
_SCRATCH = 1 << 23
_LONG_RUN = 1 << 16
"""From so many bytes on that lie together, each run is read by itself, else whole rows of which a part is kept."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file: its bytes begin at `start`."""

    file: Path
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    def __str__(self) -> str:
        return f"{self.key} in {self.file.name}"

    def read(self, box: Box | None = None) -> Tensor:
        """The elements of a box, or all, as a new tensor."""
        box = whole_box(self.shape) if box is None else box
        target = memory_for(box.shape, self.dtype)
        self.read_into(target, box)
        return target

    def read_into(self, target: Tensor, box: Box) -> None:
        """Give `target` the elements of the box. No more is held than these and, at times, 8 MiB or a tensor's bytes."""
        if not target.numel():
            return
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
        # From dimension `cut` + 1 on the box has all there is, so that what it has of one row of `cut` lies together.
        cut = next((dim for dim in reversed(range(dims)) if box.shape[dim] != self.shape[dim]), 0)
        strides = [width * prod(self.shape[dim + 1 :]) for dim in range(dims)]
        first = self.start + sum(at * stride for at, stride in zip(box.offset, strides, strict=True))
        run = prod(box.shape[cut:]) * width
        if not cut:
            self._fill(descriptor, memory, first)
            return
        pitch, rows = strides[cut - 1], box.shape[cut - 1]
        for number, outer in enumerate(itertools.product(*map(range, box.shape[: cut - 1]))):
            begin = first + sum(at * stride for at, stride in zip(outer, strides, strict=False))
            part = memory[number * rows * run :][: rows * run]
            if run >= _LONG_RUN:
                for row in range(rows):
                    self._fill(descriptor, part[row * run :][:run], begin + row * pitch)
            else:
                self._fill_rows(descriptor, part, begin, run, pitch)

    def _fill_rows(self, descriptor: int, memory: memoryview, begin: int, run: int, pitch: int) -> None:
        """Runs of bytes, one every `pitch` bytes: by way of memory for some of the rows."""
        rows, target = len(memory) // run, torch.frombuffer(memory, dtype=torch.uint8).view(-1, run)
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
                    f"{self.file} ends before {self.key} does: it was changed while it was read", code="C081"
                )
            memory, start = memory[count:], start + count


@dataclass(frozen=True)
class UnpickledTensor:
    """A tensor of a pickled file that is trusted; its bytes are read when they are asked for."""

    file: Path
    key: str
    value: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    def __str__(self) -> str:
        return f"{self.key} in {self.file.name}"

    def read(self, box: Box | None = None) -> Tensor:
        """As `StoredTensor.read`."""
        return self.value[(whole_box(self.shape) if box is None else box).slices_in(whole_box(self.shape))].clone()

    def read_into(self, target: Tensor, box: Box) -> None:
        """As `StoredTensor.read_into`."""
        with torch.no_grad():
            target.copy_(self.value[box.slices_in(whole_box(self.shape))])


AnyTensor = StoredTensor | UnpickledTensor


def tensors_in(path: Path, trust: bool = False) -> dict[str, AnyTensor]:
    """All tensors of a safetensors file, or of a folder as transformers writes it, by name; nothing of them is read.

    Pickled files (pytorch_model.bin) are read only where they are trusted, and then by torch's restricted unpickler.
    """
    if path.is_file():
        files = [path]
    elif path.is_dir():
        kinds = ("model.safetensors", INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
        found = next((path / kind for kind in kinds if (path / kind).is_file()), None)
        if found is None:
            others = sorted(path.glob("*.safetensors"))
            if len(others) != 1:
                raise CheckpointError(
                    f"{path} has no weights: neither model.safetensors nor {INDEX} is there{_interrupted(path)}",
                    code="C081",
                )
            (found,) = others
        files = _indexed(found) if found.suffix == ".json" else [found]
    else:
        raise CheckpointError(
            f"{path} is neither a folder nor a file. Weights are read from disk: download those of a hub first, with "
            f"`hf download <name> --local-dir <folder>`",
            code="C081",
        )
    tensors: dict[str, AnyTensor] = {}
    for file in files:
        tensors |= stored_tensors(file) if file.suffix == ".safetensors" else _unpickled(file, trust)
    return tensors


def _interrupted(path: Path) -> str:
    """That a save was killed while it put new files in the place of older ones, if one was."""
    asides = sorted(path.glob(".old-*"))
    return (
        f". They were being replaced when a save was killed: save again, or move back what is in {asides[0]}"
        if asides
        else ""
    )


def _indexed(index: Path) -> list[Path]:
    """The files that an index names, which must lie beside it."""
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} is no index of weights: {error}", code="C081") from error
    for name in names:
        if Path(name).name != name or not (index.parent / name).is_file():
            raise CheckpointError(
                f"{index} names {name!r}, which is no file beside it; copy the whole folder again", code="C081"
            )
    return [index.parent / name for name in names]


def _unpickled(file: Path, trust: bool) -> dict[str, AnyTensor]:
    if not trust:
        raise CheckpointError(
            f"{file} is a pickle, which may run code when it is read. Convert it to safetensors (load and save it with "
            f"transformers, once, where you trust it), or pass trust=True: then torch's weights_only loader reads it",
            code="C086",
        )
    content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    return {key: UnpickledTensor(file, key, value) for key, value in content.items() if isinstance(value, Tensor)}


def stored_tensors(file: Path) -> dict[str, AnyTensor]:
    """What a safetensors file has, by name; refuses a table that does not fit the file."""
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
        raise ValueError(f"{key} has the type {entry['dtype']}, which is none of {', '.join(WIDTHS)}")
    right = stop - start == prod(shape) * WIDTHS[entry["dtype"]]
    if any(dim < 0 for dim in shape) or not (0 <= start <= stop <= size - begin) or not right:
        raise ValueError(f"{key}, of {entry['dtype']} and shape {list(shape)}, is said to be bytes {start} to {stop}")
    return StoredTensor(file, key, dtype_named(entry["dtype"]), shape, begin + start)


def _memory(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor, to be written to. It must outlive the view."""
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")

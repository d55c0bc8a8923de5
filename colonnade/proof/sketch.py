"""Sketches: 4,096 numbers that represent a large tensor in a comparison.

`sketch` gives every element a fixed random sign and adds the elements up in 4,096 sums. The result is linear in the
tensor: the sketch of a difference is the difference of the sketches, and the same holds for factors and sums. The norm
of a sketch equals that of the tensor to about one percent (one standard deviation), for any tensor. A comparison of
sketches therefore has the same verdict as one of the tensors, because tolerances are bounds, not estimates. NaN and
infinity stay visible.

A rank sketches the shard that it stores. The reference has the full tensor, so it sketches the elements of each shard
(`Block`), one after another.

Single elements cannot be recovered from a sketch: if the diagnosis needs them, the tensor is recorded again in full.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from colonnade.checkpoint.tensor_files import raw_bytes

LARGE = 1 << 16
"""Tensors with more elements than this are sketched."""
SUMS = 4096
_ROWS = 64
"""The rows of sums that are added at once: as many as fit a cache."""
_signs: dict[torch.device, Tensor] = {}


def sketch(tensor: Tensor) -> Tensor:
    """Return the sketch of a floating point tensor, in double on the CPU."""
    with torch.no_grad():
        flat = tensor.detach().reshape(-1)
        signs, sums = _signs_for(len(flat), flat.device), torch.zeros(SUMS, dtype=torch.float64, device=flat.device)
        step = SUMS * (_ROWS if flat.device.type == "cpu" else _ROWS**2)
        for begin in range(0, len(flat), step):
            part = flat[begin : begin + step].double() * signs[begin : begin + step]
            rows = len(part) // SUMS
            sums += part[: rows * SUMS].view(rows, SUMS).sum(0)
            rest = part[rows * SUMS :]
            sums[: len(rest)] += rest
        return sums.cpu()


def _signs_for(count: int, device: torch.device) -> Tensor:
    """The signs of this number of elements, equal in every process and on every device."""
    known = _signs.get(device)
    if known is None or len(known) < count:
        # A hash of the index instead of a generator: random numbers that are drawn here would count as the model's.
        found = torch.empty(count, dtype=torch.int8, device=device)
        for begin in range(0, count, 1 << 20):
            bits = torch.arange(begin, min(begin + (1 << 20), count), device=device)
            for _ in range(2):
                bits = ((bits ^ (bits >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
            found[begin : begin + len(bits)] = ((bits >> 16) & 1) * 2 - 1
        _signs[device] = known = found
    return known[:count]


# --- Shards ---


@dataclass(frozen=True)
class Block:
    """A box of elements in a flattened full tensor: the index of the first element, and size and stride of each dimension."""

    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def at(cls, positions: Tensor) -> Block | None:
        """Return the block that has exactly these flat positions; None if the positions do not form a block."""
        if not positions.numel():
            return cls(0, tuple(positions.shape), (0,) * positions.dim())
        start, strides = int(positions.flatten()[0]), []
        for dim, size in enumerate(positions.shape):
            second = (
                positions[tuple(1 if dim == other else 0 for other in range(positions.dim()))] if size > 1 else start
            )
            strides.append(int(second) - start)
        found = cls(start, tuple(positions.shape), tuple(strides))
        if min(strides, default=0) < 0:
            return None
        largest = start + sum((size - 1) * stride for size, stride in zip(found.shape, strides, strict=True))
        return found if torch.equal(found.of(torch.arange(largest + 1)), positions) else None

    def of(self, whole: Tensor) -> Tensor:
        """Return a view of the elements of this block in a full tensor."""
        return whole.reshape(-1).as_strided(self.shape, self.strides, self.start)


Blocks = Sequence[Block | None]
"""The distinct shards of a tensor; None: the tensor in full."""


def are_whole(blocks: Blocks, count: int) -> bool:
    """Return whether blocks together cover a tensor with this number of elements."""
    if None in blocks:
        return True
    seen = torch.zeros(count, dtype=torch.bool)
    for block in blocks:
        assert block is not None
        block.of(seen).fill_(True)
    return bool(seen.all())


def sketches(whole: Tensor, blocks: Blocks) -> Tensor:
    """Return the sketches of the blocks of a full tensor, concatenated."""
    return torch.cat([sketch(whole if block is None else block.of(whole)) for block in blocks])


# --- Tensors in files ---


@dataclass(frozen=True)
class Stored:
    """The description of a tensor in a file."""

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def tensor(self, shared: bool = False) -> Tensor:
        """Map the tensor from the file: its pages are read when they are used.

        `shared`: changes are written to the file.
        """
        flat = torch.from_file(self.path, shared=shared, size=torch.Size(self.shape).numel(), dtype=self.dtype)
        return flat.view(self.shape)


def store(name: str, tensor: Tensor, folder: Path) -> Stored:
    """Write a tensor to a file, unless the folder already contains a file of the same name and sketch."""
    digest = hashlib.sha256(name.encode() + bytes(raw_bytes(sketch(tensor)))).hexdigest()
    path = folder / f"{digest[:32]}.tensor"
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        pass
    else:
        with os.fdopen(file, "wb") as into:
            into.write(raw_bytes(tensor))
    return Stored(str(path), tensor.dtype, tuple(tensor.shape))

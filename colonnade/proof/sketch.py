"""Sketches: a few numbers that stand for a large tensor in a comparison.

`sketch` gives every element a fixed random sign and adds the elements up in 4,096 sums. The result is linear in the tensor: the
sketch of a difference is the difference of the sketches, a factor stays the same factor, a sum of gradients the same sum. Its
length is that of the tensor, to about one percent (one standard deviation), whatever the tensor is. A comparison of sketches
therefore has the same verdict as one of the tensors, because tolerances are bounds, not estimates. NaN and infinity stay visible.

The elements themselves are lost: a diagnosis that needs them records the tensor again, as a whole.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from colonnade.checkpoint.tensor_files import raw_bytes

LARGE = 1 << 16
"""Tensors with more elements than this are sketched."""
_SUMS = 4096
_ROWS = 64
"""The rows of sums that are added at once: as many as fit a cache."""
_signs: dict[torch.device, Tensor] = {}


def sketch(tensor: Tensor) -> Tensor:
    """The sketch of a floating point tensor, in double on the CPU."""
    with torch.no_grad():
        flat = tensor.detach().reshape(-1)
        signs, sums = _signs_for(len(flat), flat.device), torch.zeros(_SUMS, dtype=torch.float64, device=flat.device)
        step = _SUMS * (_ROWS if flat.device.type == "cpu" else _ROWS**2)
        for begin in range(0, len(flat), step):
            part = flat[begin : begin + step].double() * signs[begin : begin + step]
            rows = len(part) // _SUMS
            sums += part[: rows * _SUMS].view(rows, _SUMS).sum(0)
            rest = part[rows * _SUMS :]
            sums[: len(rest)] += rest
        return sums.cpu()


def _signs_for(count: int, device: torch.device) -> Tensor:
    """The signs of so many elements, equal in every process and on every device."""
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


# --- Tensors in files ---


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def tensor(self) -> Tensor:
        """The tensor, mapped from the file: its pages are read when they are used."""
        flat = torch.from_file(self.path, shared=False, size=torch.Size(self.shape).numel(), dtype=self.dtype)
        return flat.view(self.shape)


def store(name: str, tensor: Tensor, folder: Path) -> Stored:
    """Write a tensor to a file, unless another process of the same folder has written one with the same name and sketch."""
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

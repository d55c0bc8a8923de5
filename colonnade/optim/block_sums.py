"""Sums of powers of the gradient blocks on one device, folded into one small vector with a value per slot."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from colonnade.errors import GradientError
from colonnade.optim.blocks import Block, to_device
from colonnade.optim.norm_readers import KernelReader, TorchReader, join, suits_kernel
from colonnade.parallel.flat import flattened


class BlockSums:
    """Measures the blocks of one device; the plan is made once, `vector` runs it."""

    def __init__(self, blocks: Sequence[Block], p: float, slots: int, *, once: bool) -> None:
        self._p, self._once = p, once
        self._blocks = sorted(blocks, key=lambda block: block.slot)
        self._read = _reader([block.owned for block in self._blocks], p, once=once)
        self.device = device = self._blocks[0].tensor.device
        self._weights: Tensor | None = None
        weights = [block.weight for block in self._blocks]
        if not math.isinf(p) and any(weight != 1.0 for weight in weights):
            self._weights = to_device(torch.tensor(weights, dtype=torch.float64), device)
        self._one_each = [block.slot for block in self._blocks] == list(range(slots))
        lengths = torch.tensor([block.slot for block in self._blocks]).bincount(minlength=slots)
        self._lengths = to_device(lengths, device)

    def rebind(self, blocks: Sequence[Block]) -> None:
        """The same blocks, elsewhere in memory; without any, nothing is held until they are given again."""
        self._blocks = sorted(blocks, key=lambda block: block.slot)
        rows = [block.owned for block in self._blocks]
        if isinstance(self._read, KernelReader):
            self._read.rebind([flattened(row) for row in rows])
        elif rows:
            self._read = _reader(rows, self._p, once=self._once)
        else:
            self._read = _nothing_bound

    def vector(self) -> Tensor:
        """2 x slots fp64 numbers: a value per slot, then how many of its blocks were not finite."""
        values = self._read()
        if self._weights is not None:
            values = torch.stack([values[0] * self._weights, values[1]])
        if self._one_each:
            return values.reshape(-1)
        return join(values.t().contiguous(), self._lengths, self._p).t().reshape(-1)

    def culprits(self) -> list[Block]:
        """The blocks that are not finite now; reads them again, and on the host."""
        flags = self._read()[1].tolist()
        return [block for block, flag in zip(self._blocks, flags, strict=True) if flag > 0]


def _nothing_bound() -> Tensor:
    raise GradientError("the gradients that were measured are gone; give the others first")


def _reader(tensors: Sequence[Tensor], p: float, *, once: bool) -> Callable[[], Tensor]:
    """What measures these tensors: returns (2, tensors) in fp64, the values and the non-finite marks."""
    rows = [flattened(tensor) for tensor in tensors]
    if once:
        return TorchReader(rows, p)
    for tensor, row in zip(tensors, rows, strict=True):
        if row.numel() and row.data_ptr() != tensor.data_ptr():
            raise GradientError(
                f"a gradient of shape {tuple(tensor.shape)} and strides {tensor.stride()} has holes or "
                "overlaps, so it cannot be measured in place; make it contiguous or use powsums()"
            )
    return KernelReader(rows) if suits_kernel(rows, p) else TorchReader(rows, p)

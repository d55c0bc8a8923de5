"""The norm of the whole world's gradient: local sums of powers, one collective, one root.

`Meter` reads the gradient blocks of this rank once and leaves a small fp64 vector on the device;
`reduce_norms` sums the vectors of all ranks with one all-reduce, so every rank has the same bits. Nothing
here waits for the device or looks at a value on the host.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.errors import GradientError
from colonnade.optim.blocks import GradientBlock, check_order
from colonnade.optim.norm_readers import KernelReader, TorchReader, join, numbers_on, suits_kernel
from colonnade.parallel.flat import flattened


@dataclass(frozen=True)
class Norms:
    """The reduced sums of powers (for p = inf: maxima) per slot, fp64, the same bits on every rank.

    `nonfinite` is above 0 for a slot with a non-finite block: how many blocks there were in the world, or
    just 1 for p = inf.
    """

    p: float
    sums: Tensor
    nonfinite: Tensor

    def per_slot(self) -> Tensor:
        """The norm of every slot."""
        return self._root(self.sums)

    def total(self, counted: Tensor | None = None) -> Tensor:
        """The norm over the slots of the mask `counted` (all of them without one), as a 0-dim tensor."""
        sums = self.sums if counted is None else torch.where(counted, self.sums, 0.0)
        if sums.numel() == 1:
            return self._root(sums.view(()))
        return self._root(sums.amax(-1) if math.isinf(self.p) else sums.sum(-1))

    def over(self, members: Tensor) -> Tensor:
        """The norms of several sets of slots at once: `members` is a mask of shape (sets, slots)."""
        sums = torch.where(members, self.sums, 0.0)
        return self._root(sums.amax(-1) if math.isinf(self.p) else sums.sum(-1))

    def _root(self, sums: Tensor) -> Tensor:
        if self.p == 1.0 or math.isinf(self.p):
            return sums
        return sums.sqrt() if self.p == 2.0 else sums.pow(1.0 / self.p)


class Meter:
    """Reads a fixed list of blocks and returns this rank's part of the norm, as often as asked.

    The blocks must stay where they are (flat gradient buffers do); only their values may change between
    measurements. With `once` nothing is prepared on the device that only a second measurement would pay back.
    """

    @torch.no_grad()
    def __init__(
        self,
        blocks: Sequence[GradientBlock],
        p: float = 2.0,
        *,
        slots: int = 1,
        device: torch.device | None = None,
        once: bool = False,
    ) -> None:
        self.p = check_order(p)
        self.slots = slots
        for slot in (block.slot for block in blocks if block.slot >= slots):
            raise GradientError(f"a block has slot {slot}, but there are only {slots} slots (0 to {slots - 1})")
        devices = list(dict.fromkeys(block.tensor.device for block in blocks))
        self.device = device or next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
        self._parts = [
            _DeviceSums([b for b in blocks if b.tensor.device == d], self.p, slots, once=once) for d in devices
        ]

    @torch.no_grad()
    def measure(self) -> Tensor:
        """The vector for `reduce_norms`: a value per slot, then a count of non-finite blocks per slot."""
        vectors = [part.vector().to(self.device, non_blocking=True) for part in self._parts]
        if not vectors:
            return torch.zeros(2 * self.slots, dtype=torch.float64, device=self.device)
        first, *others = vectors
        if not others:
            return first
        stacked = torch.stack(vectors)
        return stacked.amax(0) if math.isinf(self.p) else stacked.sum(0)


def powsums(
    blocks: Sequence[GradientBlock],
    p: float = 2.0,
    slots: int = 1,
    *,
    device: torch.device | None = None,
) -> Tensor:
    """One measurement of blocks that will not be seen again; see `Meter`."""
    return Meter(blocks, p, slots=slots, device=device, once=True).measure()


def reduce_norms(
    vector: Tensor, p: float = 2.0, group: dist.ProcessGroup | None = None, *, riders: int = 0, whole: bool = False
) -> Norms:
    """Join the vectors of all ranks of `group` (None: the world) with exactly one all-reduce, in place.

    Every rank of the group must call it, with the same number of slots, also a rank without blocks. The last `riders`
    numbers are none of the norm's: they are joined along with it. `whole`: every rank has measured everything, so that
    there is nothing to join.
    """
    order = check_order(p)
    if not whole and dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.all_reduce(vector, dist.ReduceOp.MAX if math.isinf(order) else dist.ReduceOp.SUM, group=group)
    values, nonfinite = vector[: len(vector) - riders].view(2, -1).unbind(0)
    if math.isinf(order):  # a MAX may drop a NaN, so it travelled as inf with the mark 2
        values = torch.where(nonfinite > 1.5, math.nan, values)
        nonfinite = nonfinite.clamp(max=1.0)
    return Norms(order, values, nonfinite)


class _DeviceSums:
    """Sums of powers of the blocks of one device, a value per slot; the plan is made once, `vector` runs it."""

    def __init__(self, blocks: Sequence[GradientBlock], p: float, slots: int, *, once: bool) -> None:
        self._p = p
        self._blocks = sorted(blocks, key=lambda block: block.slot)
        self._read = _reader([block.owned for block in self._blocks], p, once=once)
        (device,) = {block.tensor.device for block in blocks}
        self._weights: Tensor | None = None
        weights = [block.weight for block in self._blocks]
        if not math.isinf(p) and any(weight != 1.0 for weight in weights):
            self._weights = numbers_on(tuple(weights), torch.float64, device)
        self._one_each = [block.slot for block in self._blocks] == list(range(slots))
        counts = Counter(block.slot for block in self._blocks)
        self._lengths = numbers_on(tuple(counts[slot] for slot in range(slots)), torch.int64, device)

    def vector(self) -> Tensor:
        """2 x slots fp64 numbers: a value per slot, then how many of its blocks were not finite."""
        values = self._read()
        if self._weights is not None:
            sums, marks = values
            values = torch.stack([sums * self._weights, marks])
        if self._one_each:
            return values.reshape(-1)
        return join(values.t().contiguous(), self._lengths, self._p).t().reshape(-1)


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

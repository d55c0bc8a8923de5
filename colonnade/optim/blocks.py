"""Gradient blocks: what each rank adds to a norm that covers the whole world.

A block is a local gradient that `count` world ranks hold alike; this rank is number `index` among them. Each
element must be counted once, so replica i of n reads only the i-th slice of the block; without an index it reads all,
and counts 1/n of it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from colonnade.errors import GradientError
from colonnade.parallel.flat import FlatLayout, flattened, padded

SLICE = 64
"""Slices of a replicated block start at multiples of this many elements, so that their loads stay aligned."""

CHUNK = 1 << 16
"""Elements that one program of the CUDA norm adds up."""

STEP_CHUNK = 1024
"""Elements that one program of the CUDA optimizer step updates."""

UNIT = 8
"""The CUDA kernels take all starts and lengths to be multiples of this many elements."""


@dataclass(frozen=True, eq=False)
class GradientBlock:
    """A local gradient, the `count` ranks that hold the same elements, this rank's `index`, and its slot.

    A slot is what gets a norm of its own: a clip group, a layer, a parameter.
    """

    tensor: Tensor
    count: int = 1
    index: int | None = 0
    slot: int = 0

    def __post_init__(self) -> None:
        if self.index is not None and not 0 <= self.index < self.count:
            raise GradientError(
                f"the index of a block held by {self.count} ranks is 0 to {self.count - 1}, not {self.index}"
            )
        if self.slot < 0:
            raise GradientError(f"a slot is a number from 0 on, not {self.slot}")

    @property
    def owned(self) -> Tensor:
        """The slice of the block this rank reads; the slices of all holders make up the block once."""
        if self.count == 1 or self.index is None:
            return self.tensor
        flat = flattened(self.tensor)
        units = -(-flat.numel() // SLICE)
        start, stop = (at * units // self.count * SLICE for at in (self.index, self.index + 1))
        return flat[start:stop]

    @property
    def weight(self) -> float:
        """How much of what is read counts."""
        return 1.0 / self.count if self.index is None else 1.0


def bucket_blocks(
    layout: FlatLayout,
    buffer: Tensor,
    holdings: Sequence[tuple[int, int | None]],
    slots: Sequence[int] | None = None,
    *,
    absent: Collection[int] = (),
    alone: Collection[int] = (),
) -> list[GradientBlock]:
    """The blocks of a flat gradient bucket: neighbours with equal (count, index) and slot become one block.

    `absent` are the indices without a gradient this step. `alone` are those that another holder may keep in
    another bucket or at another place (tied parameters): their slices must not depend on their neighbours.
    Padding must be zero, as `FlatLayout.allocate` leaves it.
    """
    keys = [(*holding, slot) for holding, slot in zip(holdings, slots or [0] * len(layout), strict=True)]
    runs: list[tuple[int, int]] = []
    for index in range(len(layout)):
        if index in absent:
            continue
        before = index - 1
        joins = runs and runs[-1][1] == before and keys[before] == keys[index]
        if joins and index not in alone and before not in alone:
            runs[-1] = (runs[-1][0], index)
        else:
            runs.append((index, index))
    return [
        GradientBlock(buffer[layout.spans[first].start : padded(layout.spans[last].stop, layout.dtype)], *keys[first])
        for first, last in runs
    ]


def chunk_table(spans: Sequence[tuple[int, int]], size: int, device: torch.device) -> Tensor:
    """Cut spans [start, stop) into chunks of at most `size` elements: int32 rows (start, stop, span index).

    Starts and stops are in units of `UNIT` elements, so that a kernel knows them to be aligned; a stop is
    rounded up, into the padding.
    """
    step = size // UNIT
    pairs = [(start // UNIT, -(-stop // UNIT)) for start, stop in spans]
    total = sum(-(-(stop - start) // step) for start, stop in pairs)
    # On the host also where another device is the default one.
    starts, stops = torch.tensor(pairs, dtype=torch.int64, device="cpu").view(-1, 2).unbind(1)
    counts = (stops - starts + step - 1) // step
    owner = torch.repeat_interleave(torch.arange(len(spans), device="cpu"), counts, output_size=total)
    first = torch.cumsum(counts, 0) - counts
    begin = starts[owner] + (torch.arange(total, device="cpu") - first[owner]) * step
    table = torch.stack([begin, torch.minimum(begin + step, stops[owner]), owner], 1).to(torch.int32)
    return to_device(table, device)


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor without making the host wait for the device."""
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a CUDA device the current one, as kernel launches need it; free when it already is."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return nullcontext()
    return torch.cuda.device(device)


def check_order(p: float) -> float:
    """A norm order: a positive number, or inf; sums of powers above the 32nd of small gradients vanish in fp64."""
    try:
        order = float(p)
    except (TypeError, ValueError, OverflowError):
        order = math.nan
    if not 0 < order <= 32 and order != math.inf:
        raise GradientError(f"the order of a gradient norm is a number above 0 and up to 32, or inf, not {p!r}")
    return order

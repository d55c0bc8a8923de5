"""The 2-norm on CUDA: sums of squares of chunks of a flat buffer, then the sums of ranges of chunks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from colonnade.optim.norm import CHUNK, UNIT

TILE_BYTES = 1 << 15
"""Bytes of a buffer that one program loads at a time."""

FINISH_TILE = 4096


@triton.jit
def _square_sums(  # type: ignore[no-untyped-def]
    data, table, out, UNIT: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr
):
    program = tl.program_id(0)
    row = table + program * 3
    start = tl.load(row).to(tl.int64) * UNIT
    stop = tl.load(row + 1).to(tl.int64) * UNIT
    lanes = start + tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float32)
    for tile in tl.static_range(TILES):
        offsets = lanes + tile * TILE
        value = tl.load(data + offsets, mask=offsets < stop, other=0.0).to(tl.float32)
        total += value * value
    tl.store(out + program, tl.sum(total.to(tl.float64), axis=0))


@triton.jit
def _add_ranges(values, ranges, out, count, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0)
    first = tl.load(ranges + program * 2)
    last = tl.load(ranges + program * 2 + 1)
    lanes = tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float64)
    for start in range(first, last, TILE):
        offsets = start + lanes
        total += tl.load(values + offsets, mask=offsets < last, other=0.0)
    result = tl.sum(total, axis=0)
    # inf - inf and NaN - NaN are NaN, which differs from 0.
    finite = (result - result) == 0.0
    tl.store(out + program, result)
    tl.store(out + count + program, tl.where(finite, 0.0, 1.0).to(tl.float64))


def square_sums(data: Tensor, table: Tensor, out: Tensor) -> None:
    """out[i] = the sum of squares of chunk i of `data`; see `chunk_table` for the rows of `table`."""
    tile = TILE_BYTES // data.element_size()
    _square_sums[(len(table),)](data, table, out, UNIT, tile, CHUNK // tile, num_warps=8)


def add_ranges(values: Tensor, ranges: Tensor) -> Tensor:
    """(2, ranges) in fp64: the sum of every range [first, last) of `values`, and 1 if the sum is not finite."""
    out = torch.empty(2, len(ranges), dtype=torch.float64, device=values.device)
    _add_ranges[(len(ranges),)](values, ranges, out, len(ranges), FINISH_TILE, num_warps=8)
    return out

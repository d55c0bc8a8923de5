"""Ranges of elements in memory order, as sharded optimizers have them, cut into boxes of the whole tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from torch import Tensor

from colonnade.checkpoint.boxes import Box
from colonnade.checkpoint.locate import Located


def boxes_of_range(start: int, stop: int, shape: Sequence[int]) -> list[Box]:
    """The boxes that elements [start, stop) of a tensor in row order fill, in that order; at most two per dimension."""
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    inner = prod(shape[1:])
    first, last = -(-start // inner), stop // inner
    if first > last:  # inside one row
        return _in_row(last, start - last * inner, stop - last * inner, shape)
    found = _in_row(first - 1, start - (first - 1) * inner, inner, shape) if start < first * inner else []
    if first < last:
        found.append(Box((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])))
    return [*found, *_in_row(last, 0, stop - last * inner, shape)]


def _in_row(row: int, start: int, stop: int, shape: Sequence[int]) -> list[Box]:
    return [Box((row, *box.offset), (1, *box.shape)) for box in boxes_of_range(start, stop, shape[1:])]


def located_boxes(place: Located, start: int, stop: int, values: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """Where elements [start, stop) of a located piece lie in its whole, with the view of `values` (1-d) of each box.

    Elements are counted as they lie in memory, which need not be row order (channels-last weights).
    """
    local = place.piece.local
    order = list(range(local.dim()))
    if not local.is_contiguous():
        strides = local.stride()
        order.sort(key=lambda dim: -strides[dim])
    back = [order.index(dim) for dim in range(local.dim())]
    done = 0
    for box in boxes_of_range(start, stop, [local.shape[dim] for dim in order]):
        view = values[done : done + box.numel].view(box.shape).permute(back)
        offset = [place.box.offset[dim] + box.offset[back[dim]] for dim in range(local.dim())]
        done += box.numel
        yield Box(tuple(offset), tuple(box.shape[at] for at in back)), view

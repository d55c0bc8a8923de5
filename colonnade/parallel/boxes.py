"""Boxes of elements inside a whole tensor: where a part lies, what two share, and whether parts tile the whole.

A box is an offset and a shape. Integers only, without torch: checkpoints are listed and verified with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

_MOST_CORNERS = 1 << 23


@dataclass(frozen=True)
class Box:
    """The elements of a whole tensor from `offset` on, `shape` of them along each dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        """The first index behind it along each dimension."""
        return tuple(start + size for start, size in zip(self.offset, self.shape, strict=True))

    def shared_with(self, other: Box) -> Box | None:
        """The elements that are in both, or None."""
        start = tuple(map(max, self.offset, other.offset))
        shape = tuple(min(stops) - first for first, *stops in zip(start, self.stop, other.stop, strict=True))
        return Box(start, shape) if all(size > 0 for size in shape) else None

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """The index that takes this box out of a tensor that holds `outer`."""
        starts = [mine - origin for mine, origin in zip(self.offset, outer.offset, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.shape, strict=True))


def whole_box(shape: Iterable[int]) -> Box:
    """The box of all elements of a tensor."""
    sizes = tuple(shape)
    return Box((0,) * len(sizes), sizes)


def moved(box: Box, source: Box, target: Box) -> Box:
    """A box inside `source` as it lies where `source` becomes `target`."""
    offset = tuple(at - old + new for at, old, new in zip(box.offset, source.offset, target.offset, strict=True))
    return Box(offset, box.shape)


def tiles(boxes: Iterable[Box], shape: tuple[int, ...]) -> bool:
    """Whether the boxes cover a tensor of this shape exactly once.

    Each box must lie inside. Then they tile it if and only if their elements add up and every corner but those
    of the whole meets an even number of boxes: the corners determine where an odd number of boxes lies on top
    of each other, and if that is everywhere, the count of elements leaves no room for a second layer. A box has 2^n
    corners in the n dimensions that are cut at all; boxes with too many of them are refused by a ValueError.
    """
    filled = [box for box in boxes if box.numel]
    if not all(_inside(box, shape) for box in filled) or sum(box.numel for box in filled) != prod(shape):
        return False
    cut = [dim for dim, size in enumerate(shape) if any(box.shape[dim] != size for box in filled)]
    if len(filled) << len(cut) > _MOST_CORNERS:
        raise ValueError(f"{len(filled)} blocks that are cut along {len(cut)} dimensions are too many to be checked")
    odd: set[tuple[int, ...]] = set()
    for box in filled:
        odd ^= _corners(box, cut)
    return odd == (_corners(whole_box(shape), cut) if prod(shape) else set())


def _inside(box: Box, shape: tuple[int, ...]) -> bool:
    return len(box.offset) == len(shape) and all(
        start >= 0 and stop <= size for start, stop, size in zip(box.offset, box.stop, shape, strict=True)
    )


def _corners(box: Box, dims: Sequence[int]) -> set[tuple[int, ...]]:
    return set(product(*((box.offset[dim], box.offset[dim] + box.shape[dim]) for dim in dims)))


def boxes_in_order(start: int, stop: int, outer: Box, order: Sequence[int]) -> list[Box]:
    """The boxes that elements [start, stop) of `outer` fill, counted with its dimensions in `order`, slowest first."""
    back = places_of(order)
    return [
        Box(
            tuple(outer.offset[dim] + box.offset[at] for dim, at in enumerate(back)),
            tuple(box.shape[at] for at in back),
        )
        for box in boxes_of_range(start, stop, [outer.shape[dim] for dim in order])
    ]


def range_in_order(box: Box, outer: Box, order: Sequence[int]) -> tuple[int, int]:
    """The smallest range of elements of `outer`, counted as in `boxes_in_order`, that has all of `box` in it."""
    first = last = 0
    for dim in order:
        at = box.offset[dim] - outer.offset[dim]
        first, last = first * outer.shape[dim] + at, last * outer.shape[dim] + at + box.shape[dim] - 1
    return first, last + 1


def places_of(order: Sequence[int]) -> list[int]:
    """The place of each dimension in `order`."""
    return [order.index(dim) for dim in range(len(order))]


def boxes_of_range(start: int, stop: int, shape: Sequence[int]) -> list[Box]:
    """The boxes that elements [start, stop) of a tensor in row order fill, in that order; at most two per dimension."""
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    inner = prod(shape[1:])
    first, last = -(-start // inner), stop // inner
    if first > last:  # inside one row
        return _boxes_in_row(last, start - last * inner, stop - last * inner, shape)
    found = _boxes_in_row(first - 1, start - (first - 1) * inner, inner, shape)
    if first < last:
        found.append(Box((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])))
    return [*found, *_boxes_in_row(last, 0, stop - last * inner, shape)]


def _boxes_in_row(row: int, start: int, stop: int, shape: Sequence[int]) -> list[Box]:
    return [Box((row, *box.offset), (1, *box.shape)) for box in boxes_of_range(start, stop, shape[1:])]

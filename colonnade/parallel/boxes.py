"""Boxes of elements inside a full tensor: the position of a shard, intersections, and whether shards tile the tensor.

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
    """A box of elements in a full tensor: from `offset` on, of size `shape`."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements in the box."""
        return prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        """The end of the box (exclusive) along each dimension."""
        return tuple(start + size for start, size in zip(self.offset, self.shape, strict=True))

    def shared_with(self, other: Box) -> Box | None:
        """The intersection of this box with `other`; None if it is empty."""
        start = tuple(map(max, self.offset, other.offset))
        shape = tuple(min(stops) - first for first, *stops in zip(start, self.stop, other.stop, strict=True))
        return Box(start, shape) if all(size > 0 for size in shape) else None

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """The slices that select this box in a tensor whose elements are those of the box `outer`."""
        starts = [start - origin for start, origin in zip(self.offset, outer.offset, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.shape, strict=True))


def full_box(shape: Iterable[int]) -> Box:
    """The box of all elements of a tensor."""
    sizes = tuple(shape)
    return Box((0,) * len(sizes), sizes)


def moved(box: Box, source: Box, target: Box) -> Box:
    """Translate `box`, a box inside `source`, by the offset from `source` to `target`."""
    offset = tuple(at - old + new for at, old, new in zip(box.offset, source.offset, target.offset, strict=True))
    return Box(offset, box.shape)


def tiles(boxes: Iterable[Box], shape: tuple[int, ...]) -> bool:
    """Whether the boxes cover a tensor of this shape exactly once.

    Each box must be inside the tensor. The boxes tile the tensor if and only if two conditions hold: their numbers of elements
    add up to that of the tensor, and every corner, except those of the tensor, belongs to an even number of boxes. The second
    condition means that every element is covered by an odd number of boxes, and the first excludes three or more. A box has
    2^n corners in the n sharded dimensions.

    Raises:
        ValueError: The boxes have too many corners.
    """
    filled = [box for box in boxes if box.numel]
    for box in filled:
        if len(box.offset) != len(shape) or not all(
            start >= 0 and stop <= size for start, stop, size in zip(box.offset, box.stop, shape, strict=True)
        ):
            return False
    if sum(box.numel for box in filled) != prod(shape):
        return False
    sharded = [dim for dim, size in enumerate(shape) if any(box.shape[dim] != size for box in filled)]
    if len(filled) << len(sharded) > _MOST_CORNERS:
        raise ValueError(f"{len(filled)} blocks that are sharded along {len(sharded)} dimensions are too many to check")

    def corners(box: Box) -> set[tuple[int, ...]]:
        return set(product(*((box.offset[dim], box.offset[dim] + box.shape[dim]) for dim in sharded)))

    odd: set[tuple[int, ...]] = set()
    for box in filled:
        odd ^= corners(box)
    return odd == (corners(full_box(shape)) if prod(shape) else set())


def boxes_in_order(start: int, stop: int, outer: Box, order: Sequence[int]) -> list[Box]:
    """Split the range [start, stop) of elements of `outer` into boxes.

    Elements are numbered with the dimensions in `order`, slowest first.
    """
    back = places_of(order)
    return [
        Box(
            tuple(outer.offset[dim] + box.offset[at] for dim, at in enumerate(back)),
            tuple(box.shape[at] for at in back),
        )
        for box in boxes_of_range(start, stop, [outer.shape[dim] for dim in order])
    ]


def range_in_order(box: Box, outer: Box, order: Sequence[int]) -> tuple[int, int]:
    """The smallest range (start, stop) of elements of `outer`, numbered as in `boxes_in_order`, that contains `box`."""
    first = last = 0
    for dim in order:
        at = box.offset[dim] - outer.offset[dim]
        first, last = first * outer.shape[dim] + at, last * outer.shape[dim] + at + box.shape[dim] - 1
    return first, last + 1


def places_of(order: Sequence[int]) -> list[int]:
    """The inverse of the permutation `order`: for each dimension, its index in `order`."""
    return [order.index(dim) for dim in range(len(order))]


def boxes_of_range(start: int, stop: int, shape: Sequence[int]) -> list[Box]:
    """Split the range [start, stop) of row-major elements of a tensor into boxes, in order; at most two boxes per dimension."""
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

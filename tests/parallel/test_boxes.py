"""Boxes tile a whole exactly when every element is in one of them; ranges in row order become boxes."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade.parallel.boxes import (
    Box,
    boxes_in_order,
    boxes_of_range,
    full_box,
    moved,
    places_of,
    range_in_order,
    tiles,
)


def elements(box: Box) -> list[tuple[int, ...]]:
    return list(product(*(range(start, stop) for start, stop in zip(box.offset, box.stop, strict=True))))


@st.composite
def shapes_and_boxes(draw):
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    boxes = [full_box(shape)]
    for _ in range(draw(st.integers(0, 4))):  # cut boxes in two, so that many examples do tile
        at = draw(st.integers(0, len(boxes) - 1))
        box = boxes.pop(at)
        if not shape:
            boxes.append(box)
            continue
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, box.shape[dim]))
        for start, size in ((0, cut), (cut, box.shape[dim] - cut)):
            offset, part = list(box.offset), list(box.shape)
            offset[dim] += start
            part[dim] = size
            boxes.append(Box(tuple(offset), tuple(part)))
    for _ in range(draw(st.integers(0, 2))):  # and sometimes spoil it
        offset = tuple(draw(st.integers(-1, 3)) for _ in shape)
        extra = Box(offset, tuple(draw(st.integers(0, 2)) for _ in shape))
        if draw(st.booleans()) and boxes:
            boxes.pop()
        boxes.append(extra)
    return shape, boxes


@pytest.mark.slow
@given(shapes_and_boxes())
@settings(max_examples=200, deadline=None)
def test_tiles_is_every_element_once(case):
    shape, boxes = case
    met = sorted(element for box in boxes for element in elements(box))
    assert tiles(boxes, shape) == (met == elements(full_box(shape)))


def test_two_halves_twice_do_not_make_a_whole():
    half = Box((0,), (2,))
    assert not tiles([half, half], (4,))
    assert tiles([half, Box((2,), (2,))], (4,))


@pytest.mark.parametrize("box", [Box((1,), (2,)), Box((-1,), (2,)), Box((0, 0), (2, 1)), Box((), ())], ids=str)
def test_a_box_that_is_not_inside_tiles_nothing(box):
    assert not tiles([box], (2,))
    assert tiles([Box((0,), (2,))], (2,))


def test_a_box_moves_with_what_it_lies_in():
    assert moved(Box((3, 1), (2, 1)), Box((2, 0), (5, 2)), Box((10, 7), (5, 2))) == Box((11, 8), (2, 1))


@pytest.mark.parametrize("rank", [2, 4])
def test_a_thousand_boxes_are_checked_at_once(rank):
    boxes = [Box((at,) + (0,) * (rank - 1), (1,) + (5,) * (rank - 1)) for at in range(1000)]
    assert tiles(boxes, (1000,) + (5,) * (rank - 1))
    assert not tiles(boxes[:-1], (1000,) + (5,) * (rank - 1))


def test_only_the_dimensions_that_are_cut_count():
    halves = [Box((at,) + (0,) * 59, (1,) + (2,) * 59) for at in (0, 1)]
    assert tiles(halves, (2,) * 60)
    assert not tiles([halves[0], halves[0]], (2,) * 60)
    steps = [Box((0,) * at + (1,) + (0,) * (59 - at), (1,) * (at + 1) + (2,) * (59 - at)) for at in range(60)]
    with pytest.raises(ValueError, match="61 blocks that are sharded along 60 dimensions are too many"):
        tiles([*steps, Box((0,) * 60, (1,) * 60)], (2,) * 60)


def test_what_two_boxes_share():
    one, other = Box((1, 0), (3, 4)), Box((2, 2), (5, 5))
    shared = one.shared_with(other)
    assert shared == Box((2, 2), (2, 2))
    assert shared.slices_in(one) == (slice(1, 3), slice(2, 4))
    assert one.shared_with(Box((4, 0), (1, 1))) is None
    assert Box((), ()).shared_with(Box((), ())) == Box((), ())


SHAPES = st.lists(st.integers(1, 4), max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_a_range_is_cut_into_few_boxes_in_order(shape, data):
    whole = torch.arange(torch.empty(shape).numel()).view(shape)
    start = data.draw(st.integers(0, whole.numel()))
    stop = data.draw(st.integers(start, whole.numel()))
    boxes = boxes_of_range(start, stop, shape)
    origin = Box((0,) * len(shape), shape)
    read = [whole[box.slices_in(origin)].flatten() for box in boxes]
    assert torch.equal(torch.cat([torch.empty(0, dtype=torch.int64), *read]), torch.arange(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(SHAPES, st.data())
def test_the_range_of_a_box_is_from_its_first_to_its_last_element(shape, data):
    order = data.draw(st.permutations(range(len(shape))))
    outer = Box(tuple(data.draw(st.integers(0, 3)) for _ in shape), shape)
    start = [data.draw(st.integers(0, size - 1)) for size in shape]
    size = [data.draw(st.integers(1, size - at)) for at, size in zip(start, shape, strict=True)]
    box = Box(tuple(at + origin for at, origin in zip(start, outer.offset, strict=True)), tuple(size))
    numbers = torch.arange(torch.empty(shape).numel()).view([shape[dim] for dim in order]).permute(places_of(order))
    inside = numbers[box.slices_in(outer)]
    first, last = range_in_order(box, outer, order)
    assert (first, last) == (int(inside.min()), int(inside.max()) + 1)
    assert sum(one.numel for one in boxes_in_order(first, last, outer, order)) == last - first

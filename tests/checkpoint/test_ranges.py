"""Ranges in memory order become boxes that tile them, in order."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from colonnade.checkpoint.boxes import Box, tiles
from colonnade.checkpoint.ranges import boxes_of_range, located_boxes

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


@given(st.permutations(range(3)), st.integers(0, 24), st.integers(0, 24))
def test_ranges_of_any_memory_order_tile_the_whole(order, first, second):
    local = torch.arange(24).view(2, 3, 4).permute(order)
    flat = torch.arange(24)
    place: Any = SimpleNamespace(piece=SimpleNamespace(local=local), box=Box((0, 5, 0), tuple(local.shape)))
    cuts = sorted({0, first, second, 24})
    found = [part for start, stop in pairwise(cuts) for part in located_boxes(place, start, stop, flat[start:stop])]
    moved = [Box((box.offset[0], box.offset[1] - 5, box.offset[2]), box.shape) for box, _ in found]
    assert tiles(moved, tuple(local.shape))
    for box, (_, values) in zip(moved, found, strict=True):
        assert torch.equal(local[box.slices_in(Box((0, 0, 0), tuple(local.shape)))], values)

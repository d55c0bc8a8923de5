"""Where local tensors lie in their wholes: names, ranges in memory, sections. Ranks and layouts: tests/checkpoint."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import CheckpointError
from colonnade.parallel.boxes import Box, tiles
from colonnade.parallel.whole import _in_sections, boxes_in_memory, extra_states, locate_tensors


def test_in_one_process_every_tensor_is_found_once_under_all_its_names():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2, bias=False)
            self.b.weight = self.a.weight
            self.register_buffer("kept", torch.zeros(2, dtype=torch.int64))
            self.register_buffer("gone", torch.zeros(2), persistent=False)

        def get_extra_state(self) -> int:
            return 5

    model = Net()
    found = locate_tensors(model, ParallelContext(), "saving")
    assert [(one.label, one.names, one.shape) for one in found] == [
        ("kept", ("kept",), (2,)),
        ("a.weight", ("a.weight", "b.weight"), (2, 3)),
        ("a.bias", ("a.bias",), (2,)),
    ]
    assert all(one.places[0][0].offset == (0,) * len(one.shape) and one.holders == (0,) for one in found)
    assert found[1].local.data_ptr() == model.a.weight.data_ptr()
    assert not any(one.may_be_uneven for one in found)
    assert extra_states(model) == {"_extra_state": 5}
    model.register_state_dict_post_hook(lambda module, state, *_: state.update({"a.bias": state["a.bias"].clone()}))
    with pytest.raises(CheckpointError, match=r"does not contain the parameters a\.bias"):
        locate_tensors(model, ParallelContext(), "saving")


@given(st.permutations(range(3)), st.integers(0, 24), st.integers(0, 24))
def test_ranges_of_any_memory_order_tile_the_whole(order, first, second):
    local = torch.arange(24).view(2, 3, 4).permute(order)
    flat = torch.arange(24)
    whole = Box((0, 0, 0), tuple(local.shape))
    tensor: Any = SimpleNamespace(local=local, places=((Box((0, 5, 0), whole.shape), whole),))
    cuts = sorted({0, first, second, 24})
    found = [part for start, stop in pairwise(cuts) for part in boxes_in_memory(tensor, start, stop, flat[start:stop])]
    moved = [Box((box.offset[0], box.offset[1] - 5, box.offset[2]), box.shape) for box, _ in found]
    assert tiles(moved, tuple(local.shape))
    for box, (_, values) in zip(moved, found, strict=True):
        assert torch.equal(local[box.slices_in(whole)], values)


@pytest.mark.parametrize(
    ("start", "length", "places"),
    [
        (0, 6, [(0, 5, 3), (10, 8, 3)]),
        (3, 2, [(10, 5, 2)]),
        (2, 3, [(2, 5, 1), (10, 6, 2)]),
        (0, 3, [(0, 5, 3)]),
        (6, 0, [(6, 5, 0)]),
    ],
)
def test_what_is_cut_out_of_a_packed_part_lies_in_its_sections(start, length, places):
    """A rank has [0, 3) and [10, 13) of the whole, one after the other, and of that the elements from `start` on."""
    place = (Box((4, start), (1, length)), Box((0, 5), (1, length)))
    assert _in_sections(place, 1, [(0, 3), (10, 3)]) == [
        (Box((4, there), (1, size)), Box((0, here), (1, size))) for there, here, size in places
    ]

"""The part that a rank has of a placed tensor; and who has the interface of a sharded optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from colonnade.context.layout_builder import build_layout
from colonnade.context.parallel_mode import ParallelMode as M
from colonnade.errors import PlacementError
from colonnade.optim.zero import ZeroOptimizer
from colonnade.parallel.flat import ShardedOptimizer, packed_runs, part_indices, section_runs
from colonnade.parallel.placement import Placement, Shard, logical_shape, place, placement_of


def test_the_first_mode_cuts_first_and_dimensions_are_apart():
    layout = build_layout({"parallel": {"tensor": 2}}, 6)  # rank = 2 * data + tensor
    for rank in range(6):
        data, tensor = divmod(rank, 2)
        both = Placement({M.TENSOR: Shard(0), M.DATA: Shard(0)})
        assert part_indices(layout, both, rank) == {0: (3 * tensor + data, 6)}
        other = Placement({M.DATA: Shard(0), M.TENSOR: Shard(0)})
        assert part_indices(layout, other, rank) == {0: (rank, 6)}
        apart = Placement({M.DATA: Shard(1), M.TENSOR: Shard(0)})
        assert part_indices(layout, apart, rank) == {1: (data, 3), 0: (tensor, 2)}
        assert part_indices(layout, Placement(), rank) == {}


def test_of_sections_each_is_cut_and_the_parts_make_the_whole():
    layout = build_layout({"parallel": {"tensor": 2}}, 4)
    packed = Placement({M.TENSOR: Shard(1, sections=(4, 2, 2))})
    assert packed_runs(layout, packed, 2) == {1: [(0, 2), (4, 1), (6, 1)]}
    assert packed_runs(layout, packed, 3) == {1: [(2, 2), (5, 1), (7, 1)]}
    assert packed_runs(layout, Placement({M.TENSOR: Shard(1)}), 3) == {}
    with pytest.raises(PlacementError, match=r"sections of 4, 3 elements cannot be sharded evenly over 2 ranks"):
        section_runs((4, 3), 0, 2)


def test_sections_that_cannot_be_are_refused():
    part = nn.Parameter(torch.zeros(4, 3))
    placed = place(part, {M.TENSOR: Shard(-2, sections=(6, 2))})
    assert logical_shape(placed, placement_of(placed), {M.TENSOR: 2}) == (8, 3)
    assert str(placement_of(placed)) == "{TENSOR: Shard(0, sections=(6, 2))}"
    place(part, {M.TENSOR: Shard(0, sections=(8,))})
    assert placement_of(part).shards[M.TENSOR] == Shard(0)  # one section is none
    for shape, sections in (((4, 3), (6, 3)), ((4, 3), (8, 0)), ((0, 3), (6, 2))):
        with pytest.raises(PlacementError, match="is not an even share"):
            place(torch.zeros(shape), {M.TENSOR: Shard(0, sections=sections)})
    for shape, sections in (((4, 3), (3, 1)), ((1, 3), (2, 1))):
        placed = placement_of(place(torch.zeros(shape), {M.TENSOR: Shard(0, sections=sections)}, (sum(sections), 3)))
        assert placed.shards[M.TENSOR].sections == sections
    with pytest.raises(
        PlacementError, match="the sections have 8 elements along dimension 0, but the full tensor of shape"
    ):
        place(part, {M.TENSOR: Shard(0, sections=(6, 2))}, shape=(16, 3))
    with pytest.raises(PlacementError, match="dimension 0 has sections, so only one mode can shard it"):
        place(part, {M.TENSOR: Shard(0, sections=(6, 2)), M.DATA: Shard(0)})


def test_a_plain_optimizer_is_not_a_sharded_one():
    assert not isinstance(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0), ShardedOptimizer)
    assert all(hasattr(ZeroOptimizer, name) for name in ("flat_shard", "load_state_dict"))

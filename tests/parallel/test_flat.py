"""Flat buffers: where each tensor lies, what lies between them, and which strides a view has."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from colonnade.context.layout_builder import build_layout
from colonnade.context.parallel_mode import ParallelMode as M
from colonnade.errors import GradientError, PlacementError
from colonnade.optim.zero import ZeroOptimizer
from colonnade.parallel.flat import (
    FlatLayout,
    ShardedOptimizer,
    Span,
    flattened,
    packed_runs,
    padded,
    part_indices,
    section_runs,
    view_like,
)
from colonnade.parallel.placement import Placement, Shard, logical_shape, place, placement_of


@pytest.mark.parametrize(("dtype", "step"), [(torch.float32, 16), (torch.bfloat16, 32), (torch.complex128, 4)])
def test_every_tensor_starts_at_a_cache_line(dtype: torch.dtype, step: int) -> None:
    layout = FlatLayout([torch.zeros(size, dtype=dtype) for size in (1, step, step + 1, 0)])
    assert layout.spans == [Span(0, 1), Span(step, step), Span(2 * step, step + 1), Span(4 * step, 0)]
    assert (layout.numel, len(layout)) == (4 * step, 4)
    assert [padded(stop, dtype) for stop in (0, 1, step, step + 1)] == [0, step, step, 2 * step]


def test_views_leave_the_padding_alone_wherever_the_buffer_begins() -> None:
    tensors = [torch.randn(3, 2), torch.randn(16), torch.randn(2, 3).t()]
    layout = FlatLayout(tensors)
    memory = torch.full((5 + layout.numel,), 7.0)
    buffer = memory[5:]
    for view, tensor in zip(layout.views(buffer), tensors, strict=True):
        assert (view.shape, view.stride()) == (tensor.shape, tensor.stride())
        view.copy_(tensor)
    assert torch.equal(buffer[16:32], tensors[1])
    assert [(gap.storage_offset() - 5, len(gap)) for gap in layout.gaps(buffer)] == [(6, 10), (38, 10)]
    assert all(gap.eq(7).all() for gap in layout.gaps(buffer))
    assert memory[:5].eq(7).all()


def test_a_buffer_is_zero_and_of_the_dtype_that_is_asked_for() -> None:
    layout = FlatLayout([torch.ones(3)])
    assert torch.equal(layout.allocate(), torch.zeros(16))
    assert layout.allocate(torch.float64).dtype is torch.float64
    assert layout.allocate(device=torch.device("meta")).is_meta


@pytest.mark.parametrize(
    ("size", "stride", "dense"),
    [
        ((2, 3), (3, 1), (3, 1)),
        ((2, 3), (1, 2), (1, 2)),
        ((2, 3, 4), (12, 1, 3), (12, 1, 3)),
        ((3, 1, 2), (1, 50, 3), (1, 50, 3)),  # a stride along one element says nothing
        ((2, 3), (1, 4), (3, 1)),  # a gap
        ((2, 3), (2, 4), (3, 1)),
        ((2, 3), (0, 1), (3, 1)),
    ],
)
def test_strides_are_kept_where_the_elements_fill_their_memory(size, stride, dense) -> None:
    tensor = torch.arange(60.0).as_strided(size, stride)
    row = flattened(tensor)
    assert row.dim() == 1
    assert (row.data_ptr() == tensor.data_ptr() and row.is_contiguous()) == (stride == dense)
    viewed = view_like(torch.arange(100.0)[40:], tensor)
    assert (viewed.shape, viewed.stride(), viewed.storage_offset()) == (torch.Size(size), dense, 40)
    if stride == dense:
        assert torch.equal(view_like(row, tensor), tensor)


def test_a_row_is_its_own_row() -> None:
    row = torch.zeros(3)
    assert flattened(row) is row
    assert flattened(torch.zeros(())).shape == (1,)


def test_one_buffer_has_one_dtype_on_one_device() -> None:
    with pytest.raises(GradientError, match="not: no tensor at all"):
        FlatLayout([])
    with pytest.raises(GradientError, match=r"not: torch.float32 on cpu, torch.float64 on cpu"):
        FlatLayout([torch.zeros(1), torch.zeros(1).double()])


# -- shards -----------------------------------------------------------------------------------------------
# The part that a rank has of a placed tensor; and who has the interface of a sharded optimizer.


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
        PlacementError, match="sections of 8 elements in total along dimension 0, but the full tensor of shape"
    ):
        place(part, {M.TENSOR: Shard(0, sections=(6, 2))}, shape=(16, 3))
    with pytest.raises(PlacementError, match="has sections in dimension 0, so only one mode can shard this dimension"):
        place(part, {M.TENSOR: Shard(0, sections=(6, 2)), M.DATA: Shard(0)})


def test_a_plain_optimizer_is_not_a_sharded_one():
    assert not isinstance(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0), ShardedOptimizer)
    assert all(hasattr(ZeroOptimizer, name) for name in ("flat_shard", "load_state_dict"))

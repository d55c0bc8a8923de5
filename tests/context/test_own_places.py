"""Places that are read from groups written down by hand: they are those of the grid with the ranks renamed, or an error."""

from __future__ import annotations

import random

import pytest

from colonnade.context.layout import Layout
from colonnade.context.layout_builder import build_layout, layout_of
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import LayoutError
from colonnade.parallel import demand
from colonnade.parallel.placement import Placement, Replicate, Shard, Tied
from colonnade.utils.sampler import sample_place

M = ParallelMode
MINE = M.register("PLACES_MINE", "places_mine", data="same")
OURS = M.register("PLACES_OURS", "places_ours", data="distinct")
PARALLEL = {
    "pipeline": 2,
    "mine": {"size": 2, "mode": "places_mine"},
    "ours": {"size": 2, "mode": "places_ours"},
    "tensor": {"size": 2, "mode": "1d"},
}
WORLD = 48
PLACEMENTS = [
    {},
    {MINE: Shard(0)},
    {MINE: Replicate("sum")},
    {M.TENSOR: Shard(0), MINE: Shard(1)},
    {M.PARALLEL_1D: Shard(0), MINE: Replicate("sum")},
    {OURS: Shard(0)},
    {M.PIPELINE: Tied((0, 1), "tie"), M.TENSOR: Shard(0)},
]


def renamed(seed: int) -> tuple[Layout, list[int]]:
    """A layout whose replicas are any ranks, in ascending order, and the rank that is at each place of the grid."""
    grid = build_layout({"parallel": PARALLEL}, WORLD)
    size = WORLD // 3
    shuffled = random.Random(seed).sample(range(WORLD), WORLD)
    replicas = sorted(sorted(shuffled[at : at + size]) for at in range(0, WORLD, size))
    at = [rank for replica in replicas for rank in replica]
    model = {axis.mode for axis in grid.axes if axis.name != "data"}
    groups = {mode: grid.groups(mode) for mode in grid.modes}
    groups |= {mode: [[at[place] for place in group] for group in grid.groups(mode)] for mode in model}
    return layout_of(grid.axes, groups), at


@pytest.mark.parametrize("seed", range(3))
def test_all_that_follows_from_places_is_that_of_the_grid_with_ranks_renamed(seed: int) -> None:
    grid, (layout, at) = build_layout({"parallel": PARALLEL}, WORLD), renamed(seed)
    assert layout.places is not None
    for place, rank in enumerate(at):
        assert layout.coordinates(rank) == grid.coordinates(place)
        assert layout.rank_at(**grid.coordinates(place)) == rank
        assert sample_place(layout, rank) == sample_place(grid, place)
        for mode in grid.modes:
            assert list(layout.group_of(mode, rank)) == sorted(at[other] for other in grid.group_of(mode, place)), mode
            if mode not in (M.DATA, M.GLOBAL):  # the positions of other modes are places
                assert layout.local_rank(mode, rank) == grid.local_rank(mode, place), mode
        for modes in PLACEMENTS if place % 5 == 0 else ():
            placement = Placement(modes)
            holders = demand.holding(grid, placement, place)
            assert demand.holding(layout, placement, rank).ranks == tuple(sorted(at[other] for other in holders.ranks))
            factors, known = demand.owed(layout, placement, rank), demand.owed(grid, placement, place)
            assert [(f.mode, f.ranks, f.divisor) for f in factors] == [
                (f.mode, tuple(sorted(at[other] for other in f.ranks)), f.divisor) for f in known
            ]
            joint = demand.joint_ranks(grid, placement, known, place)
            assert demand.joint_ranks(layout, placement, factors, rank) == tuple(sorted(at[other] for other in joint))


def test_lists_that_are_the_grids_change_nothing() -> None:
    grid = build_layout({"parallel": {"tensor": 2}}, 4)
    for lists in ([[0, 1], [2, 3]], [[2, 3], [0, 1]]):
        layout = layout_of(grid.axes, {mode: grid.groups(mode) for mode in grid.modes} | {M.TENSOR: lists})
        assert layout.places is None
        assert layout.on_grid is layout
        assert layout.groups(M.TENSOR) == lists


def test_the_initializer_of_the_tensor_axis_groups_it_and_other_modes_follow() -> None:
    grid = build_layout({"parallel": {"tensor": 4}}, 8)
    groups = {mode: grid.groups(mode) for mode in grid.modes} | {MINE: [[0, 2, 4, 6], [1, 3, 5, 7]]}
    layout = layout_of(grid.axes, groups, "places_mine")
    assert layout.groups(M.TENSOR) == layout.groups(M.MODEL) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert layout.groups(M.DATA) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert not layout_of(grid.axes, groups, None).places  # a mode of its own, that is no axis's


WRONG: list[tuple[dict[str, object], int, dict[M, list[list[int]]], str]] = [
    ({"tensor": 2}, 4, {M.TENSOR: [[0, 1, 2], [3]]}, "has 2 ranks, but ParallelMode.TENSOR has the group [0, 1, 2] of 3"),
    ({"tensor": 2}, 4, {M.TENSOR: [[0, 1]]}, "rank 2, 3 of 4 is in no group of ParallelMode.TENSOR"),
    (
        {"pipeline": 2, "tensor": 2},
        8,
        {M.TENSOR: [[0, 2], [1, 3], [4, 6], [5, 7]]},
        "the group [0, 2] of ParallelMode.TENSOR contains ranks with the different coordinates 0, 1 on the axis 'pipeline'",
    ),
    (
        {"pipeline": 2, "tensor": 2},
        8,
        {M.TENSOR: [[0, 2], [1, 3], [4, 6], [5, 7]], M.PIPELINE: [[0, 5], [1, 4], [2, 6], [3, 7]]},
        "connect rank 0 with 8 ranks, but a model replica has 2 x 2 = 4",
    ),
    (
        {"tensor": 2},
        4,
        {M.DATA: [[0, 3], [1, 2]]},
        "the group [0, 3] of ParallelMode.DATA (parallel.data) contains ranks with different coordinates on other axes",
    ),
    (
        {"tensor": 2, "expert": 2},
        4,
        {M.TENSOR: [[0, 3], [1, 2]]},
        "the group of ParallelMode.EXPERT would have the ranks in the order [3, 2]",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("parallel", "world", "groups", "told"), WRONG, ids=[str(at) for at in range(len(WRONG))])
def test_groups_from_which_no_place_can_be_read_are_refused(
    parallel: dict[str, object], world: int, groups: dict[M, list[list[int]]], told: str
) -> None:
    grid = build_layout({"parallel": parallel}, world)
    with pytest.raises(LayoutError) as refused:
        layout_of(grid.axes, {mode: grid.groups(mode) for mode in grid.modes} | groups)
    assert told in str(refused.value)
    assert refused.value.code == "C161"

"""Layouts: digits of ranks, sizes that fit the world, the rank tables, and what must hold for any sizes."""

from __future__ import annotations

import subprocess
import sys
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade.context.layout import Grid, Layout, Listed, Ranks, check_mode, joined, ranks_with, refine, world_axes
from colonnade.context.layout_builder import build_layout
from colonnade.context.parallel_mode import ParallelMode
from colonnade.context.parallel_mode import ParallelMode as M
from colonnade.errors import ContextError, LayoutError

GRIDS = [(("a", 2), ("b", 3), ("c", 2)), (("a", 4), ("b", 2)), (("a", 1), ("b", 6)), (("a", 3), ("b", 1), ("c", 4))]


def by_hand(grid: Grid, names: tuple[str, ...]) -> list[list[int]]:
    """Ranks that have all other coordinates alike, in the order of their first rank."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(grid.world_size):
        here = grid.coordinates(rank)
        groups.setdefault(tuple(at for name, at in here.items() if name not in names), []).append(rank)
    return list(groups.values())


@pytest.mark.parametrize("axes", GRIDS, ids=str)
def test_groups_of_all_sets_of_axes(axes):
    grid = Grid(axes)
    assert grid.sizes == dict(axes)
    assert [grid.coordinates(rank) for rank in range(grid.world_size)] == [
        dict(zip(grid.sizes, at, strict=True)) for at in product(*(range(size) for _, size in axes))
    ]
    assert all(grid.rank_at(**grid.coordinates(rank)) == rank for rank in range(grid.world_size))
    for count in range(len(axes) + 1):
        for names in combinations(grid.sizes, count):
            groups, expected = grid.groups(*names), by_hand(grid, names)
            assert list(groups) == expected
            assert groups == expected
            assert (len(groups), groups[-1], groups[:2], repr(groups)) == (
                len(expected),
                expected[-1],
                expected[:2],
                repr(expected),
            )
            for group in expected:
                for at, rank in enumerate(group):
                    assert groups.group_of(rank) == group
                    assert groups.position(rank) == at
            for size in [size for size in range(1, len(expected[0]) + 1) if len(expected[0]) % size == 0]:
                runs, twins = groups.split_into_runs(size)
                assert sorted(runs) == sorted(
                    group[at : at + size] for group in expected for at in range(0, len(group), size)
                )
                assert sorted(twins) == sorted(group[at::size] for group in expected for at in range(size))


def test_written_groups_are_read_as_digits_where_they_are_some():
    grid = Grid((("a", 2), ("b", 3), ("c", 2)))
    for names in ((), ("a",), ("b",), ("c",), ("a", "c"), ("a", "b", "c")):
        groups = Listed(by_hand(grid, names), 12)
        digits = tuple(grid.digits[name] for name in grid.sizes if name in names)
        assert groups.digits is not None
        assert joined(groups.digits) == joined(digits)
        assert groups == grid.groups(*names)
    for groups in ([[0, 1], [2, 4], [3, 5]], [[0, 1], [2, 3]], [[0, 2, 3], [1, 4, 5]]):
        assert Listed(groups, 6).digits is None
    assert grid.groups("a") != grid.groups("b")
    assert grid.groups("a") == grid.groups("a")
    assert grid.groups("a") == Grid((("a", 2), ("x", 6))).groups("a")
    assert grid.groups("a", "b", "c") not in ("text", tuple(range(12)), [[0]])
    some = Listed([[4, 2], [1]], 6)
    assert (some.group_of(2), some.position(2), some.position(4), some.position(0)) == ([4, 2], 1, 0, -1)
    assert (some.group_of(1), len(some), some[0]) == ([1], 2, [4, 2])


@pytest.mark.parametrize(
    ("digits", "expected"),
    [
        ([], []),
        ([(1, 1)], []),
        ([(4, 2)], [(4, 2)]),
        ([(4, 2), (2, 2), (1, 2)], [(1, 8)]),
        ([(4, 3), (1, 2)], [(4, 3), (1, 2)]),
        ([(6, 2), (2, 3)], [(2, 6)]),
        ([(4, 2), (4, 1), (1, 2)], [(4, 2), (1, 2)]),
        ([(24, 2), (4, 2), (2, 2), (1, 2)], [(24, 2), (1, 8)]),
    ],
)
def test_neighbouring_digits_are_one(digits, expected):
    assert joined(digits) == expected


@pytest.mark.parametrize(
    ("products", "digits"),
    [
        ([], ((1, 12),)),
        ([[(6, 2)]], ((6, 2), (1, 6))),
        ([[(6, 2)], [(2, 3)]], ((6, 2), (2, 3), (1, 2))),
        ([[(3, 2)], [(2, 3)]], None),  # they cross
        ([[(5, 1)]], ((1, 12),)),
    ],
)
def test_the_coarsest_digits_of_several_products(products, digits):
    assert refine(products, 12) == digits


@pytest.mark.parametrize("rank", [0, 7, 23])
def test_ranks_with_some_values(rank):
    grid = Grid((("a", 2), ("b", 3), ("c", 4)))
    choices = {"a": ([0], [1], [0, 1]), "b": ([1], [0, 2], [0, 1, 2]), "c": ([3], [1, 2], [0, 1, 2, 3])}
    for count in range(4):
        for names in combinations(grid.sizes, count):
            for allowed in product(*(choices[name] for name in names)):
                wanted = dict(zip(names, allowed, strict=True))
                expected = [
                    other
                    for other in range(24)
                    if all(
                        at in wanted.get(name, [grid.coordinates(rank)[name]])
                        for name, at in grid.coordinates(other).items()
                    )
                ]
                found = ranks_with(rank, [(grid.digits[name], values) for name, values in wanted.items()])
                assert list(found) == expected, wanted


def test_a_range_of_ranks_is_a_list():
    ranks = Ranks(range(2, 10, 3))
    assert ranks == [2, 5, 8] == list(ranks)
    assert ranks == Ranks(range(2, 9, 3))
    assert ranks == (2, 5, 8)
    assert ranks not in ([2, 5], [2, 5, 9], {2, 5, 8})
    assert ranks != Ranks(range(2, 7, 3))
    assert (len(ranks), ranks[1], ranks[-1], ranks[:2], repr(ranks)) == (3, 5, 8, [2, 5], "[2, 5, 8]")
    assert 5 in ranks
    assert 6 not in ranks


def test_a_finer_grid_and_what_is_refused():
    grid = Grid((("a", 2), ("b", 6)))
    assert grid.split("b", x=2, y=3).axes == (("a", 2), ("x", 2), ("y", 3))
    for call, message in (
        (lambda: grid.split("b", x=2, y=2), "axis 'b' of size 6 cannot be split into {'x': 2, 'y': 2}"),
        (lambda: grid.split("c", x=2), "no axis 'c'; the axes are a, b"),
        (lambda: grid.groups("a", "c"), "no axis 'c'; the axes are a, b"),
        (lambda: grid.rank_at(c=0), "no axis 'c'; the axes are a, b"),
        (lambda: grid.rank_at(b=6), "axis 'b' has size 6; there is no coordinate 6"),
        (lambda: grid.rank_at(b=-1), "axis 'b' has size 6; there is no coordinate -1"),
        (lambda: grid.coordinates(12), "rank 12 is outside the world of 12 ranks"),
        (lambda: grid.coordinates(-1), "rank -1 is outside the world of 12 ranks"),
    ):
        with pytest.raises(LayoutError) as error:
            call()
        assert str(error.value).startswith(message)
    assert (grid.rank_at(), grid.rank_at(b=5), grid.rank_at(a=1)) == (0, 5, 6)


# -- sizes ---
@pytest.mark.parametrize(
    ("parallel", "world_size", "product", "fits"),
    [
        ({"pipeline": 3}, 8, "pipeline=3", "pipeline=2, or a world of 6, 9 ranks"),
        ({"pipeline": 3, "tensor": 2}, 8, "pipeline=3 x tensor=2 = 6", "pipeline=2, or a world of 6, 12 ranks"),
        ({"pipeline": 2, "tensor": 6}, 8, "pipeline=2 x tensor=6 = 12", "tensor=4, or a world of 12 ranks"),
        (
            {"pipeline": 4, "tensor": 4},
            8,
            "pipeline=4 x tensor=4 = 16",
            "pipeline=2, or tensor=2, or a world of 16 ranks",
        ),
        ({"pipeline": 7}, 5, "pipeline=7", "pipeline=5, or a world of 7 ranks"),
        ({"pipeline": 2}, 5, "pipeline=2", "pipeline=1, or a world of 4, 6 ranks"),
    ],
)
def test_sizes_that_do_not_divide_the_world_are_told_with_all_that_would_fit(parallel, world_size, product, fits):
    with pytest.raises(LayoutError) as error:
        world_axes({"parallel": parallel}, world_size)
    told = f"parallel: {product} does not divide world_size={world_size}. Possible: {fits}."
    assert str(error.value).startswith(told)


@pytest.mark.parametrize(
    ("parallel", "world_size", "message"),
    [
        ({"data": 3, "tensor": 2}, 8, "parallel: data=3 x tensor=2 = 6 is not world_size=8; data=4 would fit. "),
        ({"data": 3}, 8, "parallel: data=3 is not world_size=8; data=8 would fit. "),
        ({}, 0, "a world has at least one rank, not 0"),
        (
            {"sequence": 2, "tensor": {"size": 2, "mode": "sequence"}},
            8,
            "parallel.'tensor' and parallel.'sequence' are two axes of the one mode ParallelMode.SEQUENCE. Give one of them another mode",
        ),
    ],
)
def test_the_beginning_of_the_message(parallel, world_size, message):
    with pytest.raises(LayoutError) as error:
        world_axes({"parallel": parallel}, world_size)
    assert str(error.value).startswith(message)
    assert ("Leave `data` out to give the axis all remaining ranks." in str(error.value)) == ("data" in parallel)


def test_axes_slowest_first_and_what_data_each_sees():
    axes = world_axes({"parallel": {"pipeline": 2, "sequence": 3, "tensor": {"size": 2, "mode": "1d"}}}, 24)
    assert [(axis.name, axis.size, axis.data) for axis in axes] == [
        ("data", 2, "distinct"),
        ("pipeline", 2, "same"),
        ("sequence", 3, axes[2].mode.data),
        ("tensor", 2, "same"),
    ]


def test_a_tensor_axis_of_a_mode_with_data_of_its_own():
    *_, tensor = world_axes({"parallel": {"tensor": {"size": 2, "mode": "sequence"}}}, 4)
    assert tensor.data == ParallelMode("sequence").data == "distinct"


def test_a_mode_may_be_written_large():
    assert check_mode("1D", "here") == check_mode("1d", "here") == "Initializer_1D"
    with pytest.raises(LayoutError, match=r"^here: mode 'pipelin' is not in .*; allowed: .* Did you mean 'pipeline'"):
        check_mode("pipelin", "here")


# -- the rank tables ---
def groups(mode, world_size, **parallel):
    return build_layout({"parallel": parallel}, world_size).groups(mode)


def repeat(table, offset):
    return table + [[rank + offset for rank in group] for group in table]


EIGHT = {"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}
PAIRS = [[0, 1], [2, 3], [4, 5], [6, 7]]
SEQUENCE = {"pipeline": 2, "tensor": {"size": 2, "mode": "sequence"}}
FOUR_D = {"tensor": {"size": 8, "mode": "2.5d", "depth": 2}}
CUBE = {"tensor": {"size": 8, "mode": "3d"}}
TABLES = [
    (M.GLOBAL, 8, EIGHT, [list(range(8))]),
    (M.DATA, 8, EIGHT, [[0, 4], [1, 5], [2, 6], [3, 7]]),
    (M.MODEL, 8, EIGHT, [[0, 1, 2, 3], [4, 5, 6, 7]]),
    (M.PIPELINE, 8, EIGHT, [[0, 2], [1, 3], [4, 6], [5, 7]]),
    (M.TENSOR, 8, EIGHT, PAIRS),
    (M.PARALLEL_1D, 8, EIGHT, PAIRS),
    (M.SEQUENCE, 8, SEQUENCE, PAIRS),
    # The ancestor gave [0,1,2,3] [4,5,6,7], which mixes pipeline stages.
    (M.SEQUENCE_DP, 8, SEQUENCE, [[0, 1, 4, 5], [2, 3, 6, 7]]),
    (M.SEQUENCE, 8, {"tensor": {"size": 4, "mode": "sequence"}}, [[0, 1, 2, 3], [4, 5, 6, 7]]),
    (M.SEQUENCE_DP, 8, {"tensor": {"size": 4, "mode": "sequence"}}, [[0, 1, 2, 3, 4, 5, 6, 7]]),
    (M.DATA, 16, {"pipeline": 2, "tensor": 4}, [[i, i + 8] for i in range(8)]),
    (
        M.PIPELINE,
        16,
        {"pipeline": 2, "tensor": 4},
        [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]],
    ),
    (M.PARALLEL_2D_ROW, 8, {"tensor": {"size": 4, "mode": "2d"}}, repeat([[0, 1], [2, 3]], 4)),
    (M.PARALLEL_2D_COL, 8, {"tensor": {"size": 4, "mode": "2d"}}, repeat([[0, 2], [1, 3]], 4)),
    (M.PARALLEL_2P5D_COL, 8, FOUR_D, [[0, 2], [1, 3], [4, 6], [5, 7]]),
    (M.PARALLEL_2P5D_ROW, 8, FOUR_D, PAIRS),
    (M.PARALLEL_2P5D_DEP, 8, FOUR_D, [[0, 4], [1, 5], [2, 6], [3, 7]]),
    (M.PARALLEL_2P5D_XZ, 8, FOUR_D, [[0, 2, 4, 6], [1, 3, 5, 7]]),
    (M.PARALLEL_2P5D_XZ, 16, FOUR_D, repeat([[0, 2, 4, 6], [1, 3, 5, 7]], 8)),
    (M.PARALLEL_2P5D_DEP, 4, {"tensor": {"size": 4, "mode": "2.5d", "depth": 1}}, [[0], [1], [2], [3]]),
    (M.PARALLEL_3D_INPUT, 8, CUBE, [[0, 2], [1, 3], [4, 6], [5, 7]]),
    (M.PARALLEL_3D_WEIGHT, 8, CUBE, PAIRS),
    (M.PARALLEL_3D_OUTPUT, 8, CUBE, [[0, 4], [1, 5], [2, 6], [3, 7]]),
    (M.PARALLEL_3D_INPUT_X_WEIGHT, 8, CUBE, [[0, 1, 2, 3], [4, 5, 6, 7]]),
    (M.PARALLEL_3D_OUTPUT_X_WEIGHT, 8, CUBE, [[0, 1, 4, 5], [2, 3, 6, 7]]),
    (M.PARALLEL_3D_WEIGHT, 27, {"tensor": {"size": 27, "mode": "3d"}}, [[i, i + 1, i + 2] for i in range(0, 27, 3)]),
    (M.SEQUENCE, 8, {"sequence": 2, "tensor": 2}, [[0, 2], [1, 3], [4, 6], [5, 7]]),
    (M.SEQUENCE_DP, 8, {"sequence": 2, "tensor": 2}, [[0, 2, 4, 6], [1, 3, 5, 7]]),
    (M.EXPERT, 4, {"expert": 2}, [[0, 1], [2, 3]]),
    (M.EXPERT_DATA, 4, {"expert": 2}, [[0, 2], [1, 3]]),
    (M.MOE_MODEL, 4, {"expert": 4}, [[0, 1, 2, 3]]),
    (M.EXPERT, 4, {"tensor": 2, "expert": {"size": 2, "over": "data*tensor"}}, [[0, 1], [2, 3]]),
    (M.EXPERT, 6, {"tensor": 3, "expert": {"size": 2, "over": "data*tensor"}}, [[0, 1], [2, 3], [4, 5]]),
    (M.EXPERT_DATA, 6, {"tensor": 3, "expert": {"size": 2, "over": "data*tensor"}}, [[0, 2, 4], [1, 3, 5]]),
    (M.MOE_DATA, 4, {"expert": 1}, [[0, 1, 2, 3]]),
    # over data, beside tensor: the tensor neighbour is never in the same expert group
    (M.EXPERT, 8, {"tensor": 2, "expert": 2}, [[0, 2], [4, 6], [1, 3], [5, 7]]),
    (M.EXPERT_DATA, 8, {"tensor": 2, "expert": 2}, [[0, 4], [2, 6], [1, 5], [3, 7]]),
    # larger than data: over all ranks of a stage
    (M.EXPERT, 8, {"pipeline": 2, "tensor": 2, "expert": 4}, [[0, 1, 4, 5], [2, 3, 6, 7]]),
    (M.EXPERT_DATA, 8, {"pipeline": 2, "tensor": 2, "expert": 4}, [[r] for r in (0, 1, 4, 5, 2, 3, 6, 7)]),
    # six of twelve, which aligns with neither axis
    (M.EXPERT, 12, {"tensor": 4, "expert": 6}, [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]),
]


@pytest.mark.parametrize(("mode", "world_size", "parallel", "table"), TABLES)
def test_rank_tables(mode, world_size, parallel, table):
    assert groups(mode, world_size, **parallel) == table


sizes = st.integers(1, 4)
tensor_modes = st.one_of(
    sizes.map(lambda n: {"size": n, "mode": "1d"}),
    sizes.map(lambda n: {"size": n, "mode": "sequence"}),
    st.integers(1, 3).map(lambda n: {"size": n * n, "mode": "2d"}),
    st.tuples(st.integers(1, 2), st.integers(1, 3)).map(
        lambda t: {"size": t[0] ** 2 * t[1], "mode": "2.5d", "depth": t[1]}
    ),
    st.integers(1, 2).map(lambda n: {"size": n**3, "mode": "3d"}),
)


@pytest.mark.slow
@given(data=sizes, pipeline=sizes, tensor=tensor_modes, further=sizes, cut=st.integers(0, 99))
@settings(max_examples=150, deadline=None)
def test_any_sizes_partition_the_world(data, pipeline, tensor, further, cut):
    M.register("TEST_AXIS", "test_axis", data="distinct")
    room = data * tensor["size"]
    divisors = [d for d in range(1, room + 1) if room % d == 0]
    parallel = {
        "pipeline": pipeline,
        "tensor": tensor,
        "expert": divisors[cut % len(divisors)],
        "mine": {"size": further, "mode": "test_axis"},
    }
    world = data * pipeline * tensor["size"] * further
    layout = build_layout({"parallel": parallel}, world)
    for mode in layout.modes:
        flat = [rank for group in layout.groups(mode) for rank in group]
        assert sorted(flat) == list(range(world)), mode
        assert all(group == sorted(group) for group in layout.groups(mode))
        assert len({len(group) for group in layout.groups(mode)}) == 1
    seen = {tuple(layout.coordinates(rank).items()): rank for rank in range(world)}
    assert len(seen) == world
    assert all(layout.rank_at(**layout.coordinates(rank)) == rank for rank in range(world))
    for rank in range(world):
        for mode in layout.modes:
            assert layout.group_of(mode, rank)[layout.local_rank(mode, rank)] == rank
        both = set(layout.group_of(M.EXPERT, rank)) & set(layout.group_of(M.EXPERT_DATA, rank))
        assert both == {rank}
    assert layout.distinct_data == data * further * (tensor["size"] if tensor["mode"] == "sequence" else 1)


def test_who_sees_data_of_its_own():
    layout = build_layout({"parallel": {"pipeline": 2, "sequence": 3, "tensor": 2}}, 24)
    assert layout.distinct_data == 6
    apart = {axis.name: axis.seeded_apart for axis in layout.axes}
    assert apart == {"data": True, "pipeline": True, "sequence": True, "tensor": False}
    assert build_layout({}, 1).distinct_data == 1


def test_modes_stand_in_one_order_and_only_ranks_of_the_world_are_in_them():
    layout = build_layout({"parallel": {"pipeline": 2, "sequence": 2, "tensor": {"size": 2, "mode": "1d"}}}, 16)
    first = (M.GLOBAL, M.DATA, M.MODEL, M.PIPELINE, M.TENSOR, M.PARALLEL_1D, M.SEQUENCE, M.SEQUENCE_DP)
    assert layout.modes == first
    for mode in layout.modes:
        assert [layout.has(mode, rank) for rank in (-1, 0, 15, 16)] == [False, True, True, False]
    assert layout.rank_at(data=1, sequence=1) == 10


def test_ranks_that_are_in_no_group():
    layout = Layout(build_layout({}, 4).axes, {M.DATA: [[0, 1], [2, 3]], M.TENSOR: [[1, 2]], M.EXPERT: [[0, 2]]})
    assert [layout.has(M.DATA, rank) for rank in range(-1, 5)] == [False, True, True, True, True, False]
    assert [layout.has(M.TENSOR, rank) for rank in range(4)] == [False, True, True, False]
    assert (layout.has(M.TENSOR), layout.has(M.MODEL), layout.has(M.MODEL, 1)) == (True, False, False)
    for mode, rank in ((M.TENSOR, 0), (M.DATA, 4), (M.DATA, -1)):
        for ask in (layout.group_of, layout.local_rank):
            with pytest.raises(ContextError, match=f"rank {rank} is in no group of"):
                ask(mode, rank)
    with pytest.raises(
        ContextError, match=r"has no groups in this layout. The modes with groups are DATA, TENSOR, EXPERT"
    ):
        layout.groups(M.MODEL)
    groups = [(0, 1), (1, 2), (0, 2), (0, 3), (1, 3), (1,), (2, 3)]
    assert [layout.is_group(ranks) for ranks in groups] == [True, True, True, False, False, False, True]
    assert layout.rank_sets(1) == [(0, 1), (1, 2)]
    assert layout.rank_sets() == [(0, 1), (2, 3), (1, 2), (0, 2)]


def test_a_layout_is_regular_if_all_its_modes_are():
    axes = build_layout({}, 6).axes
    even, odd = [[0, 1], [2, 3], [4, 5]], [[0, 1], [2, 4], [3, 5]]
    assert Layout(axes, {M.DATA: even}).is_regular
    assert not Layout(axes, {M.DATA: odd}).is_regular
    assert not Layout(axes, {M.DATA: even, M.TENSOR: odd}).is_regular


def test_a_digest_is_a_number_of_62_bits_that_tells_layouts_apart():
    layouts = [build_layout({"parallel": {"tensor": tensor}}, 24 * tensor) for tensor in range(1, 60)]
    found = {layout.digest() for layout in layouts}
    assert len(found) == len(layouts)
    assert 2**61 < max(found) < 2**62
    assert build_layout({}, 24).digest() == layouts[0].digest()


def test_a_twin_never_leaves_its_stage():
    layout = build_layout({"parallel": {"pipeline": 2, "tensor": 2, "expert": 2, "sequence": 2}}, 32)
    for mode in (M.EXPERT, M.EXPERT_DATA, M.SEQUENCE_DP):
        for group in layout.groups(mode):
            assert len({layout.coordinates(rank)["pipeline"] for rank in group}) == 1


@pytest.mark.parametrize(
    ("parallel", "world_size", "parts"),
    [
        ({"tensor": {"size": 3, "mode": "2d"}}, 3, ["'2d' needs a square", "size=3", "1 and 4"]),
        ({"tensor": {"size": 8, "mode": "2.5d"}}, 8, ["'2.5d' needs a positive integer depth", "depth=2 (dim 2)"]),
        ({"tensor": {"size": 8, "mode": "2.5d", "depth": 4}}, 8, ["size must be dim x dim x depth", "depth=2 (dim 2)"]),
        ({"tensor": {"size": 9, "mode": "3d"}}, 9, ["'3d' needs a cubic", "size=9", "8 and 27"]),
        ({"tensor": {"size": 2, "mode": "4d"}}, 2, ["'4d' is not in INITIALIZER_MAPPING", "1d, 2d, 2.5d, 3d"]),
        ({"tensor": {"size": 2, "mode": "1d", "depth": 2}}, 2, ["Initializer_1D", "depth="]),
        ({"expert": 3}, 8, ["size=3, which does not divide", "allowed are 1, 2, 4, 8"]),
        ({"expert": {"size": 2, "over": "pipe"}}, 8, ["over='pipe'", "data*tensor"]),
        (
            {"tensor": 2, "expert": {"size": 4, "over": "data"}},
            4,
            ["size=4, which does not divide data 2; allowed are 1, 2"],
        ),
        (
            {"tensor": 3, "expert": 4},
            6,
            ["size=4, which does not divide data 2 x tensor 3 = 6; allowed are 1, 2, 3, 6"],
        ),
        (
            {"tensor": {"size": 8, "mode": "2.5d", "depth": 0}},
            8,
            ["has depth=0, but mode '2.5d' needs a positive integer depth"],
        ),
        (
            {"tensor": {"size": 8, "mode": "2.5d", "depth": "2"}},
            8,
            ["has depth='2', but mode '2.5d' needs a positive integer depth"],
        ),
        ({"tensor": {"size": 12, "mode": "2.5d"}}, 12, ["possible: depth=3 (dim 2), depth=12 (dim 1)"]),
        ({"tensor": {"size": 26, "mode": "3d"}}, 26, ["the nearest are 8 and 27"]),
        ({"tensor": {"size": 5, "mode": "2d"}}, 5, ["the nearest are 4 and 9"]),
        ({"mine": {"size": 2, "mode": "nowhere"}}, 8, ["'nowhere' is not a parallel mode", "register"]),
    ],
)
def test_sizes_that_make_no_world(parallel, world_size, parts):
    with pytest.raises(LayoutError) as error:
        build_layout({"parallel": parallel}, world_size)
    for part in parts:
        assert part in str(error.value)


_LARGE = """
import resource, sys, time
start = time.process_time()
from colonnade.context.layout_builder import build_layout
layout = build_layout({"parallel": {"pipeline": 16, "tensor": 8, "expert": 64}}, 1 << 20)
total = sum(len(group) for mode in layout.modes for group in layout.groups(mode))
assert "torch" not in sys.modules
print(total, time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""


@pytest.mark.slow
def test_a_million_ranks_in_two_seconds_and_one_gibibyte_without_torch():
    done = subprocess.run([sys.executable, "-c", _LARGE], capture_output=True, text=True, check=True, timeout=60)
    total, seconds, gibibytes = done.stdout.split()
    assert int(total) == 9 * 2**20  # nine modes, each with every rank once
    assert float(seconds) < 2
    assert float(gibibytes) < 1

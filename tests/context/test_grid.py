"""Digits of ranks against plain lists: every group, cut and subset of small grids, one by one."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from colonnade.context.layout import Grid, Listed, Ranks, joined, ranks_with, refine
from colonnade.errors import LayoutError

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

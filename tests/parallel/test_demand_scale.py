"""What placements demand is found by arithmetic: equal to a walk over all ranks, and no slower in a larger world."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade.context.layout import Layout
from colonnade.context.layout_builder import build_layout
from colonnade.context.parallel_mode import ParallelMode as M
from colonnade.errors import ContextError
from colonnade.parallel import demand
from colonnade.parallel.placement import Placement, Replicate, Shard, Tied
from tests.parallel import walking_demand

LISTED = M.register("SCALE_LISTED", "scale_listed")
LISTED_DISTINCT = M.register("SCALE_DISTINCT", "scale_distinct", data="distinct")
AXIS = M.register("SCALE_AXIS", "scale_axis", data="distinct")

sizes = st.integers(1, 3)
tensors = st.one_of(
    sizes.map(lambda n: {"size": n, "mode": "1d"}),
    sizes.map(lambda n: {"size": n, "mode": "sequence"}),
    st.just({"size": 4, "mode": "2d"}),
    st.just({"size": 8, "mode": "2.5d", "depth": 2}),
    st.just({"size": 8, "mode": "3d"}),
)


@st.composite
def worlds(draw: st.DrawFn) -> Layout:
    data, pipeline, further, tensor = draw(sizes), draw(sizes), draw(st.integers(1, 2)), draw(tensors)
    room = data * tensor["size"]
    parallel = {
        "pipeline": pipeline,
        "tensor": tensor,
        "expert": draw(st.sampled_from([d for d in range(1, room + 1) if room % d == 0])),
        "mine": {"size": further, "mode": "scale_axis"},
    }
    world = room * pipeline * further
    layout = build_layout({"parallel": parallel}, world)
    groups = {mode: layout.groups(mode) for mode in layout.modes}
    for mode in (LISTED, LISTED_DISTINCT):
        if draw(st.booleans()):
            groups[mode] = draw(listed_groups(layout))
    return Layout(layout.axes, groups)


@st.composite
def listed_groups(draw: st.DrawFn, layout: Layout) -> list[list[int]]:
    """Groups by hand: those of a mode, in another order, without one of them, or any cut of a shuffled world."""
    if draw(st.booleans()):
        lists = draw(st.permutations([list(group) for group in layout.groups(draw(st.sampled_from(layout.modes)))]))
        return lists[1:] if len(lists) > 1 and draw(st.booleans()) else lists
    ranks = draw(st.permutations(range(layout.world_size)))
    size = draw(st.integers(1, layout.world_size))
    return [sorted(ranks[at : at + size]) for at in range(0, layout.world_size, size)]


@st.composite
def placements(draw: st.DrawFn, layout: Layout) -> Placement:
    specs = st.sampled_from([Shard(0), Shard(0, owes="nothing"), Replicate(), Replicate("sum"), Replicate("nothing")])
    chosen = draw(st.lists(st.sampled_from(layout.modes), unique=True, max_size=3))
    modes = {mode: draw(specs) for mode in chosen}
    stages = layout.grid.sizes["pipeline"]
    if stages > 1 and draw(st.booleans()):
        tied = draw(st.sets(st.integers(0, stages - 1), min_size=2))
        modes[M.PIPELINE] = Tied(tuple(sorted(tied)), "tie")
    return Placement(modes)


def _tables(layout: Layout) -> Layout:
    """The same layout with every group listed."""
    return Layout(layout.axes, {mode: list(layout.groups(mode)) for mode in layout.modes})


def _ask(module: object, layout: Layout, placement: Placement, rank: int) -> object:
    try:
        holders = module.holding(layout, placement, rank)
        factors = module.owed(layout, placement, rank)
        joint = module.joint_ranks(layout, placement, factors, rank)
        some = module.joint_ranks(layout, placement, factors[:1], rank)
    except Exception as error:
        return type(error), str(error)
    return holders.ranks, holders.index, [(f.mode, f.ranks, f.divisor) for f in factors], joint, some


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_arithmetic_says_what_a_walk_over_all_ranks_says(data):
    layout = data.draw(worlds())
    placement = data.draw(placements(layout))
    for rank in sorted({0, layout.world_size - 1, data.draw(st.integers(0, layout.world_size - 1))}):
        assert _ask(demand, layout, placement, rank) == _ask(walking_demand, _tables(layout), placement, rank)


def by_hand(world: int, groups: dict[M, list[list[int]]], **parallel: object) -> Layout:
    layout = build_layout({"parallel": parallel}, world)
    return Layout(layout.axes, {**{mode: layout.groups(mode) for mode in layout.modes}, **groups})


def tie(*stages: int) -> dict[M, Tied]:
    return {M.PIPELINE: Tied(stages, "tie")}


TWELVE = by_hand(12, {}, tensor=4, expert=6)  # experts across the cuts of data and tensor
EIGHT = by_hand(8, {LISTED: [[0, 3], [1, 2], [4, 7], [5, 6]], LISTED_DISTINCT: [[0, 4], [1, 5]]}, tensor=2, pipeline=2)
UNEVEN = by_hand(4, {LISTED: [[0, 1, 2], [3]]})
SOME = by_hand(4, {LISTED: [[0, 1]]}, tensor=2)
STAGES = by_hand(8, {LISTED: [[0, 1], [2, 3], [4, 5], [6, 7]]}, pipeline=4)  # in pairs of stages
LINKED = by_hand(6, {LISTED: [[0, 4], [1], [2], [3], [5]]}, pipeline=3)  # a stage with one of another pipeline
HALVES = by_hand(8, {LISTED: [[0, 1, 2, 3], [4, 5, 6, 7]]}, expert=2)
PAIRS = by_hand(4, {LISTED: [[0, 1], [2, 3]], LISTED_DISTINCT: [[0, 3], [1, 2]]})  # of two ranks, but others
ALIKE = by_hand(4, {LISTED: [[0, 1, 2, 3]], LISTED_DISTINCT: [[0, 2], [1, 3]]}, expert=2)
TIED = by_hand(4, {LISTED_DISTINCT: [[0, 2], [1], [3]]}, pipeline=4)
WIDE = by_hand(8, {LISTED: [[0, 2, 4, 6], [1, 3, 5, 7]]}, pipeline=4, tensor=2)  # over all stages
ODD: list[tuple[Layout, dict]] = [
    (TWELVE, {}),
    (TWELVE, {M.EXPERT: Shard(0)}),
    (TWELVE, {M.EXPERT: Shard(0), M.TENSOR: Replicate("sum")}),
    (TWELVE, {M.EXPERT: Shard(0), M.TENSOR: Shard(0)}),
    (TWELVE, {M.TENSOR: Replicate("sum")}),
    (EIGHT, {}),
    (EIGHT, {LISTED: Shard(0)}),
    (EIGHT, {LISTED: Replicate("sum")}),
    (EIGHT, {LISTED: Replicate("sum"), M.TENSOR: Replicate("sum")}),
    (EIGHT, {M.TENSOR: Shard(0), M.DATA: Shard(0, owes="nothing")}),
    (EIGHT, tie(0, 1)),
    (EIGHT, {**tie(0, 1), LISTED: Replicate("sum")}),
    (EIGHT, {**tie(0, 1), LISTED_DISTINCT: Replicate("sum"), M.TENSOR: Shard(0)}),
    (UNEVEN, {LISTED: Shard(0)}),
    (UNEVEN, {LISTED: Replicate("sum"), M.DATA: Replicate("nothing")}),
    (SOME, {LISTED: Replicate("sum"), M.DATA: Replicate("nothing")}),
    (STAGES, {}),
    (STAGES, {LISTED: Shard(0)}),
    (STAGES, {LISTED: Replicate("sum")}),
    (STAGES, tie(0, 3)),
    (STAGES, tie(0, 1, 2)),
    (STAGES, {**tie(0, 3), LISTED: Replicate("sum")}),
    (STAGES, {**tie(0, 1), LISTED: Shard(0)}),
    (LINKED, {**tie(0, 2), LISTED: Replicate("sum")}),
    (LINKED, {**tie(0, 2), LISTED: Replicate("sum"), M.DATA: Replicate("nothing")}),
    (ALIKE, {LISTED: Replicate("sum"), M.DATA: Replicate("nothing"), M.EXPERT: Shard(0)}),
    (TIED, tie(0, 2)),
    (WIDE, {**tie(0, 1), LISTED: Replicate("sum")}),
    (WIDE, {**tie(1, 3), LISTED: Replicate("sum"), M.TENSOR: Replicate("sum")}),
    (HALVES, {M.EXPERT: Shard(0), LISTED: Replicate("sum")}),
    (PAIRS, {LISTED: Shard(0)}),
    (by_hand(4, {}, pipeline=1), {}),
    (by_hand(1, {}), {}),
]


@pytest.mark.parametrize(("layout", "modes"), ODD, ids=[str(at) for at in range(len(ODD))])
def test_so_it_does_for_groups_that_cross_each_other(layout, modes):
    for rank in range(layout.world_size):
        placement = Placement(modes)
        assert _ask(demand, layout, placement, rank) == _ask(walking_demand, _tables(layout), placement, rank), rank


@pytest.mark.slow
@given(layout=worlds())
@settings(max_examples=80, deadline=None)
def test_a_ranks_groups_are_those_of_the_tables(layout):
    for mode in layout.modes:
        groups = list(layout.groups(mode))
        places = {rank: (group, at) for group in groups for at, rank in enumerate(group)}
        assert layout.groups(mode) == groups
        assert [layout.groups(mode)[at] for at in range(len(groups))] == groups
        assert layout.groups(mode)[:2] == groups[:2]
        for rank in range(layout.world_size):
            assert layout.has(mode, rank) == (rank in places)
            if rank in places:
                assert layout.group_of(mode, rank) == places[rank][0]
                assert layout.local_rank(mode, rank) == places[rank][1]
            else:
                with pytest.raises(ContextError, match="is in no group of"):
                    layout.group_of(mode, rank)
        assert not layout.has(mode, layout.world_size)
        assert not layout.has(mode, -1)


def test_groups_listed_by_hand_that_are_a_product_of_axes_are_known_as_such():
    whole = build_layout({"parallel": {"pipeline": 2, "tensor": 2, "expert": 4}}, 16)
    layout = Layout(whole.axes, {mode: list(whole.groups(mode)) for mode in whole.modes})
    assert all(layout.groups(mode).digits is not None for mode in layout.modes)
    for odd in ([[0, 1], [2, 4], [3, 5], *([r] for r in range(6, 16))], [[0, 3], [1, 2]], [[0, 1]]):
        assert Layout(whole.axes, {LISTED: odd}).groups(LISTED).digits is None


PLACEMENTS = {
    "replicated": Placement(),
    "experts": Placement({M.EXPERT: Shard(0)}),
    "tensor": Placement({M.TENSOR: Shard(0)}),
    "partial": Placement({M.TENSOR: Replicate("sum")}),
}


def best_ms(parallel: dict, world: int, placement: Placement) -> float:
    """The quickest of several first answers, in milliseconds: a new layout for each."""
    times = []
    for _ in range(7):
        layout = build_layout({"parallel": parallel}, world)
        start = time.perf_counter()
        factors = demand.owed(layout, placement, world // 3)
        demand.holding(layout, placement, world // 3)
        demand.joint_ranks(layout, placement, factors, world // 3)
        times.append(1000 * (time.perf_counter() - start))
    return min(times)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_no_answer_takes_longer_in_a_larger_world(name):
    """The world grows by the axes of the model; groups stay as they are, so all work may stay as it is."""
    small = best_ms({"pipeline": 4, "tensor": 16, "expert": 8}, 1024, PLACEMENTS[name])
    large = best_ms({"pipeline": 512, "tensor": 16, "expert": 8}, 131_072, PLACEMENTS[name])
    assert large < 50
    assert large < 5 * small + 0.5
    # Where the group itself is the world, its 131,072 ranks are listed once for each of the three answers.
    assert best_ms({"expert": 8}, 131_072, PLACEMENTS[name]) < 150


def test_a_ranks_own_groups_among_a_million():
    times = []
    for _ in range(5):
        layout = build_layout({"parallel": {"pipeline": 16, "tensor": 8, "expert": 64}}, 1 << 20)
        start = time.perf_counter()
        groups = {mode: layout.group_of(mode, 700_000) for mode in layout.modes}
        layout.digest()
        times.append(time.perf_counter() - start)
    assert len(groups[M.GLOBAL]) == 1 << 20
    assert all(700_000 in group for group in groups.values())
    assert min(times) < 0.05


def test_answers_are_kept_with_the_layout_whatever_the_shape():
    layout = build_layout({"parallel": {"tensor": 2}}, 8)
    first = demand.owed(layout, Placement({M.TENSOR: Shard(0)}, (4, 4)), 0)
    assert demand.owed(layout, Placement({M.TENSOR: Shard(0)}, (8, 4)), 0)[0] is first[0]
    assert demand.holding(layout, Placement(), 0) is demand.holding(layout, Placement(), 0)

"""What placements demand, by arithmetic alone, against a brute-force model of who computed what."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade.context.layout_builder import build_layout
from colonnade.context.parallel_mode import ParallelMode as M
from colonnade.errors import PlacementError
from colonnade.parallel.demand import holding, joint_ranks, owed
from colonnade.parallel.placement import Placement, Replicate, Shard, Tied


def layout(world, **parallel):
    return build_layout({"parallel": parallel}, world)


def factors(world, placement, rank=0, **parallel):
    return [(f.mode.name, f.ranks, f.divisor) for f in owed(layout(world, **parallel), placement, rank)]


PLAIN = Placement()
CASES = [
    (4, {}, PLAIN, [("DATA", (0, 1, 2, 3), 4)]),
    (4, {"tensor": 2}, PLAIN, [("DATA", (0, 2), 2)]),
    (4, {"tensor": 4}, PLAIN, []),
    (4, {"tensor": 2}, Placement({M.TENSOR: Shard(0)}), [("DATA", (0, 2), 2)]),
    (4, {"tensor": 2}, Placement({M.TENSOR: Replicate("sum")}), [("DATA", (0, 2), 2), ("TENSOR", (0, 1), 1)]),
    (4, {}, Placement({M.DATA: Shard(0, owes="nothing")}), []),
    (4, {}, Placement({M.DATA: Replicate(owes="nothing")}), []),
    # experts: summed over the twin, divided by everyone who sent tokens
    (4, {"expert": 2}, Placement({M.EXPERT: Shard(0)}), [("EXPERT_DATA", (0, 2), 4)]),
    (4, {"expert": 4}, Placement({M.EXPERT: Shard(0)}), [("EXPERT_DATA", (0,), 4)]),
    (8, {"tensor": 2, "expert": 2}, Placement({M.EXPERT: Shard(0)}), [("EXPERT_DATA", (0, 4), 4)]),
    (8, {"tensor": 2, "expert": 8}, Placement({M.EXPERT: Shard(0)}), [("EXPERT_DATA", (0,), 4)]),
    # an expert group that aligns with neither axis: one sum over the twin
    (
        12,
        {"tensor": 4, "expert": 6},
        Placement({M.EXPERT: Shard(0), M.TENSOR: Replicate("sum")}),
        [("EXPERT_DATA", (0, 6), 3)],
    ),
    (8, {"pipeline": 4}, Placement({M.PIPELINE: Tied((0, 3), "e")}), [("DATA", (0, 4), 2), ("PIPELINE", (0, 3), 1)]),
    (4, {"tensor": {"size": 2, "mode": "sequence"}}, PLAIN, [("DATA", (0, 2), 2), ("TENSOR", (0, 1), 2)]),
    (4, {"sequence": 2}, PLAIN, [("DATA", (0, 2), 2), ("SEQUENCE", (0, 1), 2)]),
    (
        8,
        {"tensor": {"size": 8, "mode": "2.5d", "depth": 2}},
        Placement(
            {M.PARALLEL_2P5D_ROW: Shard(0), M.PARALLEL_2P5D_COL: Shard(1), M.PARALLEL_2P5D_DEP: Replicate("sum")}
        ),
        [("PARALLEL_2P5D_DEP", (0, 4), 1)],
    ),
]


@pytest.mark.parametrize(("world", "parallel", "placement", "expected"), CASES)
def test_what_is_owed(world, parallel, placement, expected):
    assert factors(world, placement, **parallel) == expected


def test_holders():
    grid = layout(8, pipeline=2, tensor=2)
    assert holding(grid, PLAIN, 0).ranks == (0, 1, 4, 5)
    assert holding(grid, Placement({M.TENSOR: Shard(0)}), 1).ranks == (1, 5)
    assert holding(grid, Placement({M.PIPELINE: Tied((0, 1), "e")}), 1).ranks == tuple(range(8))
    assert holding(grid, Placement({M.PIPELINE: Tied((0, 1), "e")}), 3).index == 3
    assert holding(grid, PLAIN, 4).count == 4
    assert holding(layout(4, expert=2), Placement({M.EXPERT: Shard(0)}), 1).ranks == (1, 3)


@pytest.mark.parametrize(
    ("placement", "part"),
    [
        (
            Placement({M.PARALLEL_2D_ROW: Shard(0)}),
            "PARALLEL_2D_ROW, but this layout has no groups of ParallelMode.PARALLEL_2D_ROW",
        ),
        (Placement({M.PIPELINE: Tied((0, 5), "e")}), "the pipeline has stages 0 to 1"),
        (Placement({M.PIPELINE: Tied((0, 2), "e")}), "the pipeline has stages 0 to 1"),
        (Placement({M.PIPELINE: Tied((1, 5), "e")}), "stages"),
    ],
)
def test_a_placement_that_does_not_fit_the_world_is_refused(placement, part):
    with pytest.raises(PlacementError, match=part):
        owed(layout(4, pipeline=2), placement, 0)


sizes = st.integers(1, 3)


@given(
    data=sizes,
    pipeline=sizes,
    tensor=sizes,
    sequence=sizes,
    cut=st.integers(0, 20),
    shard=st.sets(st.sampled_from([M.TENSOR, M.EXPERT]), max_size=2),
    partial=st.booleans(),
    tie=st.booleans(),
)
@settings(max_examples=60)
def test_the_sum_that_is_owed_meets_every_contribution_exactly_once(
    data, pipeline, tensor, sequence, cut, shard, partial, tie
):
    """Give every rank one token of work per (data part, stage part, tensor part) it alone has seen, and add up."""
    divisors = [d for d in range(1, data + 1) if data % d == 0]
    world = data * pipeline * tensor * sequence
    grid = layout(world, pipeline=pipeline, tensor=tensor, sequence=sequence, expert=divisors[cut % len(divisors)])
    modes = dict.fromkeys(sorted(shard, key=lambda mode: mode.value), Shard(0))
    if partial and M.TENSOR not in modes:
        modes[M.TENSOR] = Replicate("sum")
    if tie and pipeline > 1:
        modes[M.PIPELINE] = Tied((0, pipeline - 1), "tie")
    placement = Placement(modes)
    for rank in range(0, world, max(1, world // 7)):
        here = grid.coordinates(rank)
        if tie and pipeline > 1 and here["pipeline"] not in (0, pipeline - 1):
            continue
        due = owed(grid, placement, rank)
        joint = joint_ranks(grid, placement, due, rank) if due else (rank,)
        raw = {other: _tokens(grid, placement, other) for other in range(world)}
        summed = [token for other in joint for token in raw[other]]
        stages = (0, pipeline - 1) if tie and pipeline > 1 else (here["pipeline"],)
        parts = range(tensor) if partial and M.TENSOR not in shard else ["all"]
        everything = set(product(range(data), range(sequence), stages, parts))
        assert len(summed) == len(set(summed)), "a contribution was summed twice"
        assert set(summed) == everything, "a contribution is missing"
        assert prod(factor.divisor for factor in due) == data * sequence == grid.distinct_data
        assert set(joint) <= set(holding(grid, placement, rank).ranks)


def _tokens(grid, placement, rank):
    """What the raw gradient on a rank already holds: its own data, and for experts that of its expert group."""
    senders = grid.group_of(M.EXPERT, rank) if M.EXPERT in placement.shards else [rank]
    here = grid.coordinates(rank)
    part = (
        here["tensor"]
        if isinstance(placement.on(M.TENSOR), Replicate) and placement.on(M.TENSOR).owes == "sum"
        else "all"
    )
    return [
        (grid.coordinates(other)["data"], grid.coordinates(other)["sequence"], here["pipeline"], part)
        for other in senders
    ]

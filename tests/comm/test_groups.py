"""Process groups beyond those of the modes."""

from __future__ import annotations

import torch
import torch.distributed as dist

from colonnade._launch import launch
from colonnade.comm.groups import NoGroups, ProcessGroups
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.testing import run_world


def _ask_twice() -> list[float]:
    """Only ranks 0 and 3 want the pair, and they want it twice; then everybody wants another one, and second ones."""
    there = len(dist.distributed_c10d._world.pg_map)
    with launch({"parallel": {"tensor": 2}}, context=ParallelContext(), verbose=False) as gpc:
        rank, sums, created = gpc.get_global_rank(), [], []
        original = dist.new_group
        dist.new_group = lambda ranks, *rest, **named: created.append(ranks) or original(ranks, *rest, **named)
        for _ in range(2):
            gpc.ensure_groups([(0, 3)] if rank in (0, 3) else [])
        gpc.ensure_groups([(0, 1, 2)])
        assert created == [[0, 3], [0, 1, 2]]
        second = gpc.get_second_group(ParallelMode.TENSOR, "gloo")
        assert second is gpc.get_second_group(ParallelMode.TENSOR, "gloo") is not gpc.get_group(ParallelMode.TENSOR)
        assert created[2:] == [[0, 1], [2, 3]]
        dist.new_group = original
        asked = [((0, 3), gpc.group_of_ranks), ((0, 1, 2), gpc.group_of_ranks)]
        for ranks, group_of in [*asked, (gpc.get_ranks_in_group(ParallelMode.TENSOR), lambda ranks: second)]:
            if rank in ranks:
                value = torch.tensor([float(rank)])
                dist.all_reduce(value, group=group_of(ranks))
                sums.append(value.item())
    assert len(dist.distributed_c10d._world.pg_map) == there  # the world is another's, and all else has gone
    return sums


def test_further_groups_are_created_once_whoever_asks():
    assert run_world(4, _ask_twice).values == [[3.0, 3.0, 1.0], [3.0, 1.0], [3.0, 5.0], [3.0, 5.0]]


def test_groups_of_another_owner_are_known_with_those_of_other_ranks():
    groups, theirs = ProcessGroups(1), object()
    assert (0, 1) not in groups
    groups.adopt((0, 1), theirs, [(2, 3)])
    assert groups.group([0, 1]) is theirs
    assert (0, 1) in groups
    assert (2, 3) in groups
    assert len(groups) == 1
    groups.destroy()  # but not what is theirs


def test_a_simulated_world_has_no_groups():
    assert NoGroups().group([0, 1]) is None

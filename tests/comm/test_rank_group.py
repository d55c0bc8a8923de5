"""Ranks without a torch group: one alone, never several. Connections of their own."""

from __future__ import annotations

import pytest

from colonnade.comm.rank_group import RankGroup, own_gloo
from colonnade.errors import GradientError
from colonnade.testing import run_world


def test_one_rank_needs_no_group_and_hears_itself():
    group = RankGroup((3,), None)
    assert group.alone
    assert (group.size, group.index) == (1, 0)
    assert group.gather_objects({"a": 1}) == [{"a": 1}]


@pytest.mark.parametrize("ranks", [(0, 1), (0, 1, 2)])
def test_several_ranks_without_a_group_are_refused(ranks):
    with pytest.raises(GradientError, match="was given the group of"):
        RankGroup(ranks, None)


def connect_and_leave():
    for _ in range(20):
        own_gloo()


def test_a_rank_that_lets_go_of_its_connections_at_once_leaves_the_others_theirs():
    run_world(4, connect_and_leave, timeout=30)

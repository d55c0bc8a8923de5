"""Ranks without a torch group: one alone, never several."""

from __future__ import annotations

import pytest

from colonnade.comm.rank_group import RankGroup
from colonnade.errors import GradientError


def test_one_rank_needs_no_group_and_hears_itself():
    group = RankGroup((3,), None)
    assert group.alone
    assert (group.size, group.index) == (1, 0)
    assert group.gather_objects({"a": 1}) == [{"a": 1}]


@pytest.mark.parametrize("ranks", [(0, 1), (0, 1, 2)])
def test_several_ranks_without_a_group_are_refused(ranks):
    with pytest.raises(GradientError, match="was given the group of"):
        RankGroup(ranks, None)

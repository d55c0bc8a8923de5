"""Groups under one name each, and where elements of a part lie in another."""

from __future__ import annotations

import torch

from colonnade.proof.case import Groups, places_in, sum_of_passes
from colonnade.proof.compare import LocalValue
from tests.proof.made_up import World


def test_the_world_is_no_mode_of_its_own_where_others_reach_it():
    groups = Groups(World(2, 2).evidence())
    assert sorted(groups.of_mode) == ["DATA", "TENSOR"]
    assert groups.joint(("DATA", "TENSOR"), 0) == (0, 1, 2, 3)
    assert groups.joint((), 3) == (3,)


def test_modes_with_the_same_ranks_have_the_name_by_which_a_sum_is_owed():
    groups = Groups(World(2, 1).evidence())
    assert list(groups.of_mode) == ["DATA"]
    assert groups.name("GLOBAL") == "DATA"


def test_places_of_a_slice():
    holder = LocalValue(0, torch.zeros(4), torch.tensor([7, 5, 3, 1]))
    assert places_in(LocalValue(0, torch.zeros(2), torch.tensor([3, 5])), holder).tolist() == [2, 1]
    assert places_in(LocalValue(0, torch.zeros(2), torch.tensor([3, 4])), holder) is None
    assert (
        places_in(
            LocalValue(0, torch.zeros(1), torch.tensor([3])), LocalValue(0, torch.zeros(0), torch.zeros(0).long())
        )
        is None
    )


def test_passes_are_added_up():
    passes = [
        [LocalValue(0, torch.ones(2)), LocalValue(1, torch.ones(2))],
        [LocalValue(0, torch.ones(2)), LocalValue(1, torch.ones(3))],
    ]
    summed = sum_of_passes(passes, 0.5)
    assert summed[0].value.tolist() == [1, 1]
    assert 1 not in summed

"""The sampler: every sample once, the same to ranks that see the same data, and resumed on another layout."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.context.build import build_layout
from colonnade.errors import ConfigError
from colonnade.utils import DistinctDataSampler

sizes = st.integers(1, 4)


def samplers(length, world, shuffle=True, drop_last=False, **parallel):
    layout = build_layout({"parallel": parallel}, world)
    return layout, [DistinctDataSampler(range(length), layout, rank, shuffle, 7, drop_last) for rank in range(world)]


@given(length=st.integers(4, 40), data=sizes, tensor=sizes, pipeline=sizes, sequence=sizes, shuffle=st.booleans())
def test_every_sample_is_given_once_per_epoch_to_ranks_of_distinct_data(
    length, data, tensor, pipeline, sequence, shuffle
):
    world = data * tensor * pipeline * sequence
    layout, every = samplers(length, world, shuffle, tensor=tensor, pipeline=pipeline, sequence=sequence)
    for _ in range(2):
        given_to = [list(sampler) for sampler in every]
        assert len({len(part) for part in given_to}) == 1
        by_place = {}
        for rank in range(world):
            here = layout.coordinates(rank)
            place = (here["data"], here["sequence"])
            assert by_place.setdefault(place, given_to[rank]) == given_to[rank]
        together = [sample for part in by_place.values() for sample in part]
        assert set(together) == set(range(length))
        assert len(together) - length < data * sequence


def test_drop_last_repeats_nothing():
    _, every = samplers(11, 4, drop_last=True)
    together = [sample for sampler in every for sample in sampler]
    assert len(together) == len(set(together)) == 8


def test_epochs_differ_and_are_repeatable():
    _, (sampler,) = samplers(20, 1)
    first, second = list(sampler), list(sampler)
    assert first != second
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_a_run_goes_on_in_mid_epoch_with_another_number_of_ranks():
    _, four = samplers(24, 4)
    seen = []
    for sampler in four:
        iterator = iter(sampler)
        seen += [next(iterator) for _ in range(3)]
    state = four[0].state_dict()
    _, two = samplers(24, 2)
    for sampler in two:
        sampler.load_state_dict(state)
        seen += list(sampler)
    assert sorted(seen) == list(range(24))


def test_what_cannot_be_shared_is_refused():
    with pytest.raises(ConfigError, match="empty"):
        samplers(0, 1)
    with pytest.raises(ConfigError, match="cannot be shared by 4 ranks"):
        samplers(3, 4, drop_last=True)

"""The sampler: every sample once, the same to ranks that see the same data, and resumed on another layout."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from colonnade.context import ParallelMode
from colonnade.context.layout_builder import build_layout
from colonnade.errors import ConfigError
from colonnade.utils import DistinctDataSampler
from colonnade.utils.sampler import sample_place

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
            assert by_place.setdefault(here["data"], given_to[rank]) == given_to[rank]
        together = [sample for part in by_place.values() for sample in part]
        assert set(together) == set(range(length))
        assert len(together) - length < data


def test_drop_last_repeats_nothing():
    _, every = samplers(11, 4, drop_last=True)
    together = [sample for sampler in every for sample in sampler]
    assert len(together) == len(set(together)) == 8


def test_epochs_differ_and_are_repeatable():
    _, (sampler,) = samplers(20, 1)
    first, second = list(sampler), list(sampler)
    assert first != second
    assert sampler.state_dict() == {"epoch": 2, "position": 0, "seed": 7}
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_one_rank_has_the_order_of_torchs_own_sampler():
    _, (sampler,) = samplers(20, 1)
    torchs = DistributedSampler(range(20), 1, 0, seed=7)  # type: ignore[arg-type, var-annotated]
    for epoch in range(3):
        torchs.set_epoch(epoch)
        assert list(sampler) == list(torchs)


@pytest.mark.parametrize(
    "parallel", [{"tensor": 2, "sequence": 2}, {"pipeline": 2, "tensor": {"size": 2, "mode": "sequence"}}]
)
def test_ranks_of_a_sequence_group_get_the_same_samples(parallel):
    layout = build_layout({"parallel": parallel}, 8)
    for group in layout.groups(ParallelMode.SEQUENCE):
        assert len({sample_place(layout, rank) for rank in group}) == 1
    assert [sample_place(layout, rank) for rank in range(8)] == [
        (layout.coordinates(rank)["data"], 2) for rank in range(8)
    ]


def test_ranks_of_a_further_axis_of_distinct_data_get_different_samples():
    ParallelMode.register("SAMPLER_APART", "sampler_apart", data="distinct")
    layout = build_layout({"parallel": {"sampler_apart": {"size": 2}}}, 4)
    assert sorted(sample_place(layout, rank) for rank in range(4)) == [(at, 4) for at in range(4)]
    assert sample_place(build_layout({}, 1), 0) == (0, 1)


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
    with pytest.raises(ConfigError, match="is too small for 4 ranks"):
        samplers(3, 4, drop_last=True)
    assert [len(sampler) for sampler in samplers(4, 4, drop_last=True)[1]] == [1] * 4
    assert [len(sampler) for sampler in samplers(1, 4)[1]] == [1] * 4

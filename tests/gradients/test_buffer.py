"""The owned slice of a bucket: what passes bring is put into it, or on top of what is there."""

from __future__ import annotations

import pytest
import torch

from colonnade.gradients.bucket import GradientShard

DTYPES = [torch.float64, torch.float32, torch.float16]


@pytest.mark.parametrize("factor", [1.0, 0.5, torch.tensor(0.5)], ids=str)
@pytest.mark.parametrize("into", DTYPES)
@pytest.mark.parametrize("total", DTYPES)
@pytest.mark.parametrize("landed", [False, True])
def test_a_total_lands_times_its_factor(landed, total, into, factor):
    shard = GradientShard(torch.tensor([9.0, 2.0, 3.0, 9.0], dtype=into))
    shard.landed = landed
    shard.land(torch.tensor([4.0, 6.0], dtype=total), factor, start=1)
    there = torch.tensor([2.0, 3.0]) if landed else torch.zeros(2)
    middle = there + torch.tensor([4.0, 6.0]) * float(factor)
    assert shard.flat.tolist() == [9.0, *middle.tolist(), 9.0]


def test_a_new_slice_has_nothing_and_takes_a_narrower_total_in_its_own_digits():
    shard = GradientShard(torch.full((2,), 9.0))
    assert shard.landed is False
    shard.land(torch.ones(2, dtype=torch.float16), 1 / 3)
    assert torch.equal(shard.flat, torch.full((2,), 1 / 3))


@pytest.mark.parametrize("landed", [False, True])
def test_a_sum_that_is_too_large_for_the_slice_is_divided_before_it_lands(landed):
    shard = GradientShard(torch.zeros(1, dtype=torch.float16))
    shard.landed = landed
    shard.land(torch.tensor([1e6]), 0.001)
    assert shard.flat.item() == 1000.0


def test_of_two_types_as_wide_the_factor_comes_after() -> None:
    shard = GradientShard(torch.zeros(1, dtype=torch.bfloat16))
    shard.land(torch.tensor([60000.0], dtype=torch.float16), 4.0)
    assert shard.flat.item() == torch.tensor(60000.0).bfloat16().item() * 4

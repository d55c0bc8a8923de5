"""Random numbers by position: any part is drawn alone, and together they are what they should be."""

from __future__ import annotations

import math

import torch

from colonnade.parallel import meta

EVERY = torch.arange(1 << 18)


def test_a_part_is_a_part_of_the_whole():
    for draw in (meta.uniform, meta.normal):
        whole = draw(7, EVERY)
        assert torch.equal(draw(7, EVERY[1000:1777]), whole[1000:1777])
        assert not torch.equal(draw(8, EVERY), whole)


def test_the_numbers_are_those_of_splitmix64():
    """Written out in Python's own numbers, which do not wrap around."""
    key, mask = 123456789, (1 << 64) - 1
    for position in (0, 1, 5, 1 << 40):
        z = (key + position * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        expected = ((z ^ (z >> 31)) >> 12) * 2.0**-52 + 2.0**-53
        assert meta.uniform(key, torch.tensor([position])).item() == expected


def test_uniform_numbers_fill_their_range_evenly():
    values = meta.uniform(3, EVERY, -2.0, 6.0)
    assert -2 < values.min() < -1.999
    assert 5.999 < values.max() < 6
    counts = torch.histc(values, 64, -2, 6)
    chi_square = ((counts - len(EVERY) / 64) ** 2 / (len(EVERY) / 64)).sum()
    assert chi_square < 63 + 5 * math.sqrt(2 * 63)
    neighbours = torch.corrcoef(torch.stack([values[:-1], values[1:]]))[0, 1]
    assert abs(neighbours) < 0.01


def test_normal_numbers_have_the_moments_of_a_normal_distribution():
    values = meta.normal(3, EVERY, 1.0, 0.5).sub(1).div(0.5)
    moments = [values.pow(power).mean().item() for power in (1, 2, 3, 4)]
    for found, expected, width in zip(moments, (0, 1, 0, 3), (1, 2, 15, 96), strict=True):
        assert abs(found - expected) < 5 * math.sqrt(width / len(EVERY))
    assert values.isfinite().all()


def test_positions_of_a_block_in_the_whole():
    whole = torch.arange(4 * 6 * 5).view(4, 6, 5)
    strides = meta.row_strides(whole.shape)
    for block in (whole, whole[1:3], whole[:, 2:4], whole[1:2, 3:, 1:4], whole[:, :, 2:3], whole[2:2]):
        first = block.storage_offset()
        found = meta.positions_in(torch.arange(block.numel()), block.shape, first, strides)
        assert torch.equal(found, block.flatten())
    assert meta.positions_in(torch.arange(1), (), 3, ()).tolist() == [3]
    apart = whole.flatten().repeat(3).as_strided((2, 3, 4), (12, 50, 3), 7)  # the last fits into the first, not between
    assert torch.equal(meta.positions_in(torch.arange(24), (2, 3, 4), 7, (12, 50, 3)) % 120, apart.flatten())


def test_numbers_wrap_around_at_64_bits():
    wraps = {5: 5, (1 << 63) - 1: (1 << 63) - 1, 1 << 63: -(1 << 63), (1 << 64) - 1: -1, (1 << 64) + 5: 5, -3: -3}
    assert {number: meta._signed(number) for number in wraps} == wraps

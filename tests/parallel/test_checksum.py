"""Checksums: every bit counts, and equal bits give equal numbers wherever they lie."""

from __future__ import annotations

import pytest
import torch

from colonnade.parallel.held import checksum, words_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.bool])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (16, 4), (0, 3)])
def test_every_bit_of_every_element_counts(dtype, shape):
    generator = torch.Generator().manual_seed(0)
    whole = torch.rand(shape, generator=generator).mul(100).to(dtype)
    right = checksum(whole).tolist()
    assert right == checksum(whole.clone()).tolist()
    bits = whole.clone().reshape(-1).view(torch.uint8)
    for at in range(bits.numel()):
        for bit in (0, 5):
            bits[at] ^= 1 << bit
            changed = bits.view(dtype).reshape(shape) if whole.dim() else bits.view(dtype)[0]
            assert checksum(changed)[0].item() != right[0]
            bits[at] ^= 1 << bit


def test_two_changes_that_cancel_in_the_sum_do_not_in_the_squares():
    whole = torch.tensor([5, 9, 1, 7])
    other = torch.tensor([6, 8, 1, 7])
    first, second = checksum(whole), checksum(other)
    assert first[0] == second[0]
    assert first[1] != second[1]


def test_where_a_tensor_lies_does_not_matter():
    whole = torch.randn(6, 5)
    memory = torch.zeros(200)
    for offset in (1, 2, 16):
        view = memory[offset : offset + 30].view(6, 5)
        view.copy_(whole)
        assert torch.equal(checksum(view), checksum(whole))
    turned = whole.t().contiguous().t()
    assert torch.equal(checksum(turned), checksum(whole))
    assert words_of(torch.ones(3)).shape == (2,)


def test_on_other_devices_it_is_two_numbers_too():
    assert checksum(torch.zeros(5, device="meta")).shape == (2,)


@pytest.mark.parametrize(("start", "count"), [(0, 16), (8, 8), (9, 8), (1, 7), (3, 5), (0, 0)])
def test_words_are_the_bytes_wherever_they_begin(start, count):
    raw = torch.arange(1, 33, dtype=torch.uint8)[start : start + count]
    words = words_of(raw)
    assert words.dtype is torch.int64
    expected = bytes(raw.tolist()) + bytes(-count % 8)
    assert words.numpy().tobytes() == expected

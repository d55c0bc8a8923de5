"""The tolerance is derived from dtype, number of terms and spread."""

from __future__ import annotations

import pytest
import torch

from colonnade.proof.compare import Compared, Tolerance, typical_spread

ONE = torch.ones(100, dtype=torch.float64)


def test_a_wrong_factor_of_1_001_is_outside_in_fp64_and_fp32():
    for dtype in (torch.float64, torch.float32):
        assert Tolerance(dtype, 64).of(Compared(ONE, (), terms=4096)) < 0.001 * 10


def test_a_factor_of_2_is_outside_in_bf16_and_rounding_inside():
    allowed = Tolerance(torch.bfloat16, 8).of(Compared(ONE, (), spread=0.04, terms=4096))
    assert 10 * 2**-8 < allowed < 10


def test_it_grows_with_the_spread_the_terms_and_the_additions():
    plain = Tolerance(torch.float64).of(Compared(ONE, ()))
    assert Tolerance(torch.float64).of(Compared(ONE, (), spread=1e-10)) == pytest.approx(8e-10, rel=1e-3)
    assert Tolerance(torch.float64).of(Compared(ONE, (), terms=100)) > 5 * plain
    assert Tolerance(torch.float64, 100).of(Compared(ONE, ())) > 5 * plain


def test_half_types_sum_their_terms_in_fp32():
    few, many = (Tolerance(torch.bfloat16).of(Compared(ONE, (), terms=terms)) for terms in (1, 4096))
    assert many < 1.01 * few


def test_a_gradient_that_is_zero_but_for_noise_has_the_tolerance_of_its_noise():
    noise = torch.full((4,), 1e-18, dtype=torch.float64)
    assert Tolerance(torch.float64).of(Compared(noise, (), spread=3e-18)) > 2e-17


def test_whole_numbers_are_exact():
    assert Tolerance(torch.float64).of(Compared(torch.tensor([3, 4]), (), spread=1.0)) == 0


def test_a_lucky_small_spread_is_raised_to_the_usual_one():
    some = [Compared(ONE, (), spread=spread) for spread in (0.0, 1e-9, 1e-9)]
    typical = typical_spread(some)
    assert Tolerance(torch.float64).of(some[0], typical) == pytest.approx(8e-9, rel=1e-3)

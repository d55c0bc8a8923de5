"""What a number can mean in a layout."""

from __future__ import annotations

import pytest

from colonnade.proof.case import digits, near

SIZES = {"DATA": 4, "TENSOR": 2, "PIPELINE": 1, "accumulation": 3}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (4.0, ["size of DATA"]),  # simpler than (size of TENSOR)²
        (0.5, ["1 / size of TENSOR"]),
        (3.0, ["accumulation"]),
        (8.0, ["size of DATA * size of TENSOR"]),
        (2 / 3, ["size of TENSOR / accumulation"]),
        (16.0, ["(size of DATA)²"]),
        (2**0.5, ["√(size of TENSOR)"]),
        (1.37, []),
        (1.0, []),
    ],
)
def test_the_simplest_product_of_sizes_is_named(value: float, expected: list[str]) -> None:
    assert [str(factor) for factor in near(value, SIZES, 1e-9)] == expected


def test_sizes_that_are_equal_are_all_named():
    assert [str(one) for one in near(2.0, {"DATA": 2, "TENSOR": 2}, 1e-9)] == ["size of DATA", "size of TENSOR"]


def test_a_factor_has_enough_digits_not_to_read_as_1() -> None:
    assert [digits(value) for value in (1.5, 1.0000003, 1 + 1e-11, 1.0)] == ["1.5", "1.0000003", "1.00000000001", "1"]

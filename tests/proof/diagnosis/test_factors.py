"""What a number can mean in a layout."""

from __future__ import annotations

from colonnade.proof.case import near

SIZES = {"DATA": 4, "TENSOR": 2, "PIPELINE": 1, "accumulation": 3}


def words(value: float) -> list[str]:
    return [str(factor) for factor in near(value, SIZES, 1e-9)]


def test_a_size_is_simpler_than_a_square_or_a_product():
    assert words(4.0) == ["size of DATA"]
    assert words(0.5) == ["1 / size of TENSOR"]
    assert words(3.0) == ["accumulation"]


def test_products_ratios_squares_and_roots():
    assert words(8.0) == ["size of DATA * size of TENSOR"]
    assert words(2 / 3) == ["size of TENSOR / accumulation"]
    assert words(16.0) == ["(size of DATA)²"]
    assert words(2**0.5) == ["√(size of TENSOR)"]


def test_what_is_no_product_has_no_words():
    assert words(1.37) == []
    assert words(1.0) == []


def test_sizes_that_are_equal_are_all_named():
    assert [str(one) for one in near(2.0, {"DATA": 2, "TENSOR": 2}, 1e-9)] == ["size of DATA", "size of TENSOR"]

"""Which gradients count as different between ranks, by the two numbers that each rank has of each."""

from __future__ import annotations

import pytest
import torch

from colonnade.engine.checks.same_gradients import _compare
from colonnade.errors import GradientError

HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64


def compare(*ranks: list[tuple[float, float]], dtype: torch.dtype = SINGLE) -> None:
    names = [f"p{at}" for at in range(len(ranks[0]))]
    sums = torch.tensor([[(along, norm**2) for along, norm in rank] for rank in ranks], dtype=torch.float64)
    _compare(names, [dtype] * len(names), sums)


def test_what_is_alike_or_nothing_but_rounding_passes():
    compare([(1.0, 2.0), (0.0, 0.0), (3.0, 3.0)], [(1.0, 2.0), (0.0, 0.0), (3.0, 3.0)])
    compare([(1.0, 2.0), (3.0, 3.0), (1.0, 1.0)], [(1.0009, 2.0), (3.0, 3.0009), (1.0, 1.0)])
    compare([(1.0, 2.0), (1e-6, 1e-6), (1.0, 1.0)], [(1.0, 2.0), (-1e-6, 1e-6), (1.0, 1.0)])
    compare([(1.0, 1.0)], [(1.09, 1.09)], dtype=HALF)


@pytest.mark.parametrize(
    ("ranks", "dtype", "found"),
    [
        (([(1.0, 2.0), (3.0, 3.0), (1.0, 1.0)], [(1.0, 2.0), (-3.0, 3.0), (1.0, 1.0)]), SINGLE, "'p1'"),
        (([(1.0, 2.0), (3.0, 3.0)], [(1.0, 2.0), (3.0, 3.1)], [(1.0, 2.0), (3.0, 3.0)]), SINGLE, "'p1'"),
        (([(1.0, 2.0)], [(1.0, 2.0)], [(0.0, 2.0)]), DOUBLE, "'p0'"),
        (([(1.0, 1.0), (0.0, 0.0)], [(1.25, 1.25), (0.0, 0.0)], [(1.0, 1.0), (0.0, 0.0)]), HALF, "'p0'"),
        (([(1.0, 1.0), (0.0, 0.0)], [(1.0, 1.0), (1e-3, 1e-3)], [(1.0, 1.0), (0.0, 0.0)]), SINGLE, "'p1'"),
    ],
)
def test_what_differs_is_named(ranks, dtype, found):
    with pytest.raises(GradientError) as error:
        compare(*ranks, dtype=dtype)
    assert str(error.value).startswith(
        f"the plan leaves {found} whole, but the ranks of the tensor group have different"
    )


def test_eight_are_named():
    with pytest.raises(GradientError) as error:
        compare([(1.0, 1.0)] * 9, [(-1.0, 1.0)] * 9)
    assert "'p0', 'p1', 'p2', 'p3', 'p4', 'p5', 'p6', 'p7' ... whole" in str(error.value)
    with pytest.raises(GradientError) as error:
        compare([(1.0, 1.0)] * 8, [(-1.0, 1.0)] * 8)
    assert "'p7' whole" in str(error.value)

"""Weights are found where there is one set of them only, and patterns of passes have names."""

from __future__ import annotations

import pytest
import torch

from colonnade.proof.hypotheses.mixtures import _Pattern, solved

COLUMNS = list(torch.randn(3, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64))


def test_weights_are_those_that_make_the_value() -> None:
    value = 2 * COLUMNS[0] - 0.5 * COLUMNS[2]
    assert solved(COLUMNS, value, 1e-12) == pytest.approx([2, 0, -0.5], abs=1e-12)


@pytest.mark.parametrize(
    "columns",
    [[one[:8] for one in COLUMNS], [*COLUMNS, COLUMNS[0] + COLUMNS[1]], [*COLUMNS, torch.zeros(20)], []],
    ids=["too few numbers", "not apart", "empty", "none"],
)
def test_weights_that_many_sets_could_be_are_not_told(columns: list[torch.Tensor]) -> None:
    assert solved(columns, COLUMNS[0][: len(columns[0])] if columns else COLUMNS[0], 1e-12) is None


def test_a_value_that_is_no_mixture_has_no_weights() -> None:
    assert solved(COLUMNS, COLUMNS[0].sin(), 1e-12) is None


@pytest.mark.parametrize(
    ("weights", "cause"),
    [
        ([1, 1, 1], None),
        ([3, 3, 3], None),
        ([1, -1, 1], None),
        ([0, 0, 3], "last-micro-batch-only"),
        ([3, 0, 0], "micro-batch-missing"),
        ([1, 0, 1], "micro-batch-missing"),
        ([1, 2, 1], "micro-batch-twice"),
        ([2, 0, 1], "micro-batch-twice"),
        ([4, 2, 1], "reduced-twice"),
        ([3, 3, 1], "scaled-by-accumulation"),
        ([1 / 9, 1 / 3, 1], "scaled-by-accumulation"),
    ],
)
def test_patterns_of_passes_have_names(weights: list[float], cause: str | None) -> None:
    named = _Pattern(weights, 1e-6, {"DATA": 2}).named()
    assert (named[0] if named else None) == cause

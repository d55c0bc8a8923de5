"""The numbers of a step, collected by hand."""

from __future__ import annotations

import math

import pytest
import torch

from colonnade.trainer.records import Draft, weigh


@pytest.mark.parametrize(
    ("count", "rows", "weight", "total"),
    [
        (None, 0, 1.0, 2.5),
        (None, 4, 4.0, 10.0),
        (1, 4, 1.0, 2.5),
        (torch.tensor(3), 4, 3.0, 7.5),
        (0, 4, 0.0, 0.0),
    ],
)
def test_a_batch_weighs_what_its_criterion_counted_or_its_rows(count, rows, weight, total):
    found, weighs = weigh(torch.tensor([2.5 if weight else math.nan]), count, rows)
    assert found is not None
    assert (found.item(), float(weighs), found.shape, found.dtype) == (total, weight, (), torch.float64)
    assert weigh(None, count, rows) == (None, 0.0)


def test_a_step_of_which_no_rank_tells_the_loss_has_none():
    draft = Draft((1, 0, 1.0), 0, {}, {})
    assert draft.sums() == [0.0, 0.0, 0.0]
    found = draft.record([0.0, 0.0, 4.0])
    assert (found.loss, found.lr, found.grad_norm) == (None, None, None)
    assert found.numbers() == {"samples": 4, "seconds": 1.0}

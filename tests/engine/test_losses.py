"""What a loss given as (sum, count) may count, and what becomes of counts that are no counts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from colonnade.engine.losses import LossBook
from colonnade.engine.schedule.base import BaseSchedule
from colonnade.errors import GradientError
from colonnade.trainer.records import weigh
from tests.engine.test_engine import numbers, start, world_of_one

WRONG = [
    math.nan,
    math.inf,
    -1,
    -0.5,
    None,
    "3",
    torch.tensor(math.nan),
    torch.tensor(-2),
    torch.tensor([1.0, 2.0]),
]


@pytest.mark.parametrize("count", WRONG, ids=str)
def test_a_count_that_is_no_count_is_refused(count):
    with world_of_one() as gpc:
        engine = start(gpc)
        loss = engine.criterion(engine(numbers(3, 4, seed=0)), numbers(3, 2, seed=1))
        with pytest.raises(GradientError, match=r"the count of a loss .* a number from 0 on"):
            engine.backward((loss, count))
        engine.backward((loss, 3))  # nothing was counted or summed
        engine.step()


@pytest.mark.parametrize("count", [math.nan, math.inf, -2.0])
def test_a_wrong_count_on_a_device_makes_the_step_not_finite(count):
    with world_of_one() as gpc:
        book = LossBook(gpc, 2)
        book.add(torch.tensor(9.0))
        book.add(torch.tensor(count))
        factor = book.factor()
        assert factor is not None
        assert not factor.isfinite()


def test_a_batch_without_anything_to_count_weighs_nothing():
    class Counted(BaseSchedule):
        loss_count = torch.tensor(0.0)

        def forward_back_step(self, *args, **kwargs): ...

    total, weight = weigh(Counted(), torch.tensor(math.nan))
    assert isinstance(total, Tensor)
    assert (total.item(), float(weight)) == (0.0, 0.0)

"""The sum in which the order counts, and every bit."""

from __future__ import annotations

from itertools import permutations

import torch

from colonnade.engine.checks import ordered_sum


def test_another_order_and_any_other_number_give_another_sum():
    assert ordered_sum(torch.tensor([], dtype=torch.int64)) == 0
    assert ordered_sum(torch.tensor([5])) == 5
    given = [*permutations([1, 2, 3]), [0, 2, 0], [1, 0, 1], [1, 2], [0, 1, 2], [1, 2, 4]]
    assert len({int(ordered_sum(torch.tensor(numbers))) for numbers in given}) == len(given)
    for at in range(9):  # the highest bit of any of them
        numbers = torch.ones(9, dtype=torch.int64)
        numbers[at] += torch.iinfo(torch.int64).min
        assert ordered_sum(numbers) != ordered_sum(torch.ones(9, dtype=torch.int64))

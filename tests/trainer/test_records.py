"""The numbers of a step, collected by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.testing import run_world
from colonnade.trainer import records
from colonnade.trainer.records import Draft, count_tokens, is_first_with_data, slots_of, weigh
from tests.trainer.test_data import world


@pytest.mark.parametrize(
    ("count", "rows", "weight", "total"),
    [(None, 0, 1.0, 2.5), (None, 4, 4.0, 10.0), (1, 4, 1.0, 2.5), (torch.tensor(3), 4, 3.0, 7.5), (0, 4, 0.0, 0.0)],
)
def test_a_batch_weighs_what_its_criterion_counted_or_its_rows(count, rows, weight, total):
    found, weighs = weigh(torch.tensor([2.5 if weight else math.nan]), count, rows)
    assert found is not None
    assert (found.item(), float(weighs), found.shape, found.dtype) == (total, weight, (), torch.float64)
    assert weigh(None, count, rows) == (None, 0.0)


def test_a_step_of_which_no_rank_tells_the_loss_has_none():
    draft = Draft((1, 0, 1.0), 0, {}, {})
    assert draft.sums() == [0.0, 0.0, 0.0, 0.0]
    found = draft.record([0.0, 0.0, 4.0, 0.0])
    assert (found.loss, found.lr, found.grad_norm) == (None, None, None)
    assert found.numbers() == {"samples": 4, "seconds": 1.0}


@pytest.mark.parametrize(("world", "late"), [(4, 2), (64, 63), (100, 99), (1000, 17)])
def test_the_rank_that_the_others_wait_for_is_named(world, late):
    """The time that it computes is the largest; beyond 64 ranks, the first of the neighbours that share a number."""
    slots = slots_of(world)
    assert [rank for ranks in slots for rank in ranks] == list(range(world))
    assert len(slots) == min(world, 64)

    def draft(rank: int) -> Draft:
        busy = 3.0 if rank == late else 1.0
        times: Any = SimpleNamespace(
            read=lambda: {"forward": busy - 0.5, "communication": 2.0, "other": 2.0 - busy, "data": 0.5}
        )
        return Draft((1, 0, 4.0), 0, {}, {}, None, times, 0, slots, rank)

    sums = [sum(each) for each in zip(*(draft(rank).sums() for rank in range(world)), strict=True)]
    (ranks,) = (ranks for ranks in slots if late in ranks)
    busy = draft(0).record(sums).busy
    assert busy == {"slowest": 1.0 + 2.0 / len(ranks), "fastest": 1.0, "slowest_rank": ranks[0]}
    assert draft(0).record(sums).numbers()["busy/fastest"] == 1.0


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        ({"input_ids": torch.zeros(2, 5, dtype=torch.long), "labels": torch.zeros(2, 5, dtype=torch.long)}, 10),
        ((torch.zeros(2, 3, 8), torch.zeros(2, dtype=torch.long)), 0),
        ([torch.zeros(2, 3, dtype=torch.bool), (torch.zeros(2, 7, dtype=torch.int32),)], 14),
        (None, 0),
    ],
)
def test_tokens_are_the_integers_of_rows(batch, count):
    assert count_tokens(batch) == count


# -- exchange ---------------------------------------------------------------------------------------------
# Who speaks for whom, and which values are gathered.


@pytest.mark.parametrize(
    ("context", "data", "rows"),
    [
        (world(2), [0, 1], [0, 1]),
        (world(4, tensor=2), [0, 2], [0, 2]),
        (world(4, pipeline=2), [0, 1, 2, 3], [0, 2]),
        (world(4, sequence=2), [0, 1, 2, 3], [0, 2]),
        (world(4, pipeline=2, tensor=2), [0, 2], [0]),
        (world(8, pipeline=2, tensor=2), [0, 2, 4, 6], [0, 4]),
    ],
)
def test_the_first_rank_of_those_that_see_the_same_data_speaks(context, data, rows):
    def speakers(rows: bool) -> list[int]:
        found = []
        for rank in range(context.world_size):
            here: Any = SimpleNamespace(layout=context.layout, get_global_rank=lambda rank=rank: rank)
            assert is_first_with_data(here) == is_first_with_data(here, rows=False)
            found += [rank] if is_first_with_data(here, rows) else []
        return found

    assert (speakers(False), speakers(True)) == (data, rows)


def gathered() -> list[Any]:
    with launch({}, context=ParallelContext(), verbose=False) as gpc:
        rank = gpc.get_global_rank()
        value = {"a": torch.full((2,), float(rank), dtype=torch.bfloat16), "b": [rank, torch.ones(rank, 2) > 0]}
        found = records.gather_values(value, rank != 1, gpc)
        assert records.gather_values(value, False, gpc) == []
        return found


def test_values_of_the_ranks_that_have_one_are_gathered_in_their_order():
    for first, third in run_world(3, gathered).values:
        for rank, found in ((0, first), (2, third)):
            assert (found["a"].tolist(), found["a"].dtype) == ([rank, rank], torch.bfloat16)
            assert (found["b"][0], found["b"][1].tolist()) == (rank, [[True, True]] * rank)
    value = {"a": torch.ones(2)}
    assert records.gather_values(value, True, ParallelContext()) == [value]
    assert records.gather_values(value, False, ParallelContext()) == []

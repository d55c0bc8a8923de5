"""The numbers of a step, collected by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from colonnade.trainer import StepRecord, records
from colonnade.trainer.records import (
    _DIVISOR,
    _LOSS,
    _LR,
    _NORM,
    _WEIGHT,
    Draft,
    RecordBook,
    count_tokens,
    slots_of,
    weigh,
)


class Clock:
    restarts = 0

    def restart(self) -> None:
        self.restarts += 1

    def end_step(self) -> None: ...


def engine(*rates: float, norm: Any = None, divisor: Any = None) -> Any:
    groups = [{"lr": rate} for rate in rates]
    return SimpleNamespace(
        optimizer=SimpleNamespace(param_groups=groups), grad_norm=norm, clip_divisor=divisor, last_skip_flag=None
    )


def test_a_record_has_the_loss_of_all_passes_and_the_rate_of_the_first_group():
    clock: Any = Clock()
    book = RecordBook(clock)
    assert clock.restarts == 1
    assert book.draft() is None
    book.add_pass(torch.tensor(6.0), 2.0, 4)
    book.add_pass(torch.tensor(3.0), 1.0, 3)
    book.add_pass(None, 9.0, 2)
    book.add({"mine": 5, "other": torch.tensor(7.0)})
    book.end_step(8, 2, engine(0.5, 0.25, norm=torch.tensor(3.0)))
    book.add({"late": 1.0})
    assert book._samples == 9
    assert book._values["mine"] == 5.0
    assert book._values[_LR] == 0.5
    assert book._values["late"] == 1.0
    assert book._tensors["other"].item() == 7.0
    assert book._tensors[_LOSS].item() == 9.0
    assert book._weight == 3.0
    assert book._place is not None
    assert book._place[:2] == (8, 2)
    assert 0 <= book._place[2] < 60
    assert book.draft() is not None
    assert book.draft() is None
    assert (book._samples, book._weight, book._tensors, book._values) == (0, 0.0, {}, {})
    book.end_step(9, 2, engine())
    assert _LR not in book._values


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


@pytest.mark.parametrize(
    ("skip", "divisor", "clipped", "skipped"),
    [
        (None, None, False, False),
        (None, 1.0, False, False),
        (None, 2.0, True, False),
        (0.0, 2.0, True, False),
        (1.0, 2.0, False, True),
        (1.0, None, False, True),
    ],
)
def test_a_record_is_made_of_what_the_ranks_have_added_up(skip, divisor, clipped, skipped):
    flag: Any = None if skip is None else SimpleNamespace(read=lambda: skip)
    times: Any = None if skip is None else SimpleNamespace(read=lambda: {"data": 1.0})
    values = {_LR: 0.5, "mine": 3.0} | ({} if divisor is None else {_DIVISOR: divisor})
    tensors = {_LOSS: torch.tensor(6.0), _WEIGHT: torch.tensor(2.0), _NORM: torch.tensor([9.0])}
    draft = Draft((7, 1, 0.25), 8, tensors, values, flag, times, 80)
    assert draft.sums() == [6.0, 2.0, 8.0, 80.0]
    found = draft.record([12.0, 4.0, 16.0, 160.0])
    assert found == StepRecord(
        step=7,
        epoch=1,
        loss=3.0,
        lr=0.5,
        grad_norm=9.0,
        samples=16,
        seconds=0.25,
        weight=4.0,
        tokens=160,
        clipped=clipped,
        skipped=skipped,
        times={} if skip is None else {"data": 1.0},
        values={"mine": 3.0},
    )
    marks = {"clipped": 1.0} if clipped else {"skipped": 1.0} if skipped else {}
    assert found.numbers() == {
        **dict(loss=3.0, lr=0.5, grad_norm=9.0, samples=16, tokens=160, seconds=0.25, mine=3.0),
        **marks,
        **({} if skip is None else {"time/data": 1.0}),
    }


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


def test_numbers_of_the_host_join_those_of_a_device(monkeypatch):
    copied: list[torch.Tensor] = []
    monkeypatch.setattr(records, "HostCopy", copied.append)
    for devices, device in ((("cpu", "meta", "cpu"), "meta"), (("cpu", "cpu"), "cpu")):
        Draft((1, 0, 1.0), 0, {str(at): torch.ones((), device=each) for at, each in enumerate(devices)}, {})
        stacked = copied.pop()
        assert (stacked.device.type, stacked.dtype, stacked.shape) == (device, torch.float64, (len(devices),))

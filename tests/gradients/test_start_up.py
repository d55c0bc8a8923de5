"""Which groups are connected for shared memory before the first step, in one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from colonnade.errors import GradientError
from colonnade.gradients import synchroniser
from colonnade.gradients.sums import Sum, SyncOptions
from colonnade.gradients.synchroniser import open_groups


class Group:
    """Stands for the ranks of a group; three ranks cannot share."""

    def __init__(self, ranks: tuple[int, ...], group: None, log: object) -> None:
        self.ranks, self.alone = ranks, len(ranks) == 1
        self.asked: bool | None = None
        self.sockets: Any = None
        self.closed = False

    def share_memory(self, must: bool) -> None:
        self.asked = must
        if must and len(self.ranks) == 3:
            raise GradientError("three cannot share")
        self.sockets = object()

    def close(self) -> None:
        self.closed = True


def opened(*sums: tuple[int, str, dict[str, Any]]) -> tuple[dict[tuple[int, ...], Any], list[str]]:
    """The groups of sums over so many ranks, on that device and with those options; and what was said."""
    made = [
        Sum(
            (f"p{at}",),
            (nn.Parameter(torch.zeros(1, device=device)),),
            tuple(range(ranks)),
            None,
            1.0,
            SyncOptions(**options),
        )
        for at, (ranks, device, options) in enumerate(sums)
    ]
    said: list[str] = []
    return open_groups(made, said.append), said  # type: ignore[return-value]


@pytest.fixture(autouse=True)
def _groups(monkeypatch):
    monkeypatch.setattr(synchroniser, "RankGroup", Group)


@pytest.mark.parametrize(
    ("sums", "asked"),
    [
        ([(2, "cpu", {})], False),
        ([(2, "cpu", {"shared_memory": True})], True),
        ([(2, "cpu", {"shared_memory": False})], None),
        ([(2, "meta", {})], None),  # not in memory of the host
        ([(1, "cpu", {"shared_memory": True})], None),  # with nobody
        ([(2, "meta", {}), (2, "cpu", {})], False),
        ([(2, "cpu", {"shared_memory": False}), (2, "cpu", {"shared_memory": True})], True),
    ],
)
def test_memory_is_shared_where_it_is_wanted_and_lies_on_the_host(sums, asked):
    (group,) = opened(*sums)[0].values()
    assert group.asked is asked


def test_there_is_one_group_for_each_set_of_ranks():
    groups, said = opened((4, "cpu", {}), (2, "cpu", {}), (4, "cpu", {}))
    assert list(groups) == [(0, 1), (0, 1, 2, 3)]
    assert said == []


def test_parameters_of_two_sums_and_divisors_that_are_none_are_refused():
    parameter = nn.Parameter(torch.zeros(1))
    one = Sum(("a",), (parameter,), (0,), None, 0.5)
    assert open_groups([one], print)
    for wrong in ([one, replace(one, names=("b",))], [replace(one, divisor=0.0)], [replace(one, divisor=-0.5)]):
        with pytest.raises(GradientError, match=r"is in two sums|a divisor must be greater than 0"):
            open_groups(wrong, print)


def test_a_group_that_must_share_and_cannot_is_an_error_after_the_others_were_opened(monkeypatch):
    made: list[Group] = []
    monkeypatch.setattr(synchroniser, "RankGroup", lambda *args: made.append(Group(*args)) or made[-1])
    with pytest.raises(GradientError, match="three cannot share"):
        opened((3, "cpu", {"shared_memory": True}), (4, "cpu", {}))
    assert [group.asked for group in made] == [True, False]
    assert all(group.closed for group in made)

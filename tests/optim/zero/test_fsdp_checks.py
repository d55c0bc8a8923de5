"""The order of collectives among two ranks, of which one is told: what it says at each place, and when it asks."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from colonnade.errors import GradientError
from colonnade.optim.zero import fsdp_checks
from colonnade.optim.zero.fsdp_checks import STEP, Event, RunOrder

A, B = Event("gathers a"), Event("gathers b")


class Other:
    """Rank 1: says what rank 0 says, unless `differ` changes the row (place, code, whether it stepped)."""

    def __init__(self) -> None:
        self.differ: Callable[[list[int]], list[int]] = list
        self.text: list[Any] = []
        self.sent: list[list[int]] = []

    def gather(self, everyone: Tensor, mine: Tensor) -> Any:
        if mine.dtype is torch.uint8:  # what each was about to do
            text = json.dumps(self.text).encode()
            row = torch.zeros_like(mine[0])
            row[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            everyone.copy_(torch.stack([mine[0], row]))
        else:
            self.sent.append(mine[0].tolist())
            everyone.copy_(torch.tensor([self.sent[-1], self.differ(self.sent[-1])]))
        return SimpleNamespace(wait=lambda: None)


@pytest.fixture
def other(monkeypatch):
    rank = Other()
    monkeypatch.setattr(fsdp_checks.dist, "get_process_group_ranks", lambda group: [4, 6])
    monkeypatch.setattr(fsdp_checks, "gloo_beside", lambda group: rank.gather)
    monkeypatch.setattr(
        fsdp_checks, "gather_in_pieces", lambda mine, gather: [mine, json.dumps(rank.text or json.loads(mine)).encode()]
    )
    return rank


def order_of() -> RunOrder:
    return RunOrder(None)  # type: ignore[arg-type]


def run(order: RunOrder, *events: Event, replayed: list[Event] | None = None) -> None:
    for event in events:
        order.issue(event, lambda event=event: (replayed if replayed is not None else []).append(event))


def test_the_first_step_asks_before_each_collective_and_later_ones_once(other):
    order = order_of()
    run(order, A, B)
    order.step()
    assert other.sent == [[1, A.code, 0], [2, B.code, 0], [3, STEP.code, 0]]
    for _ in range(2):
        other.sent.clear()
        run(order, A, B)
        order.step()
        assert other.sent == [[0, 0, 1]]


def test_ranks_that_leave_the_plan_together_go_on_and_twice_makes_a_new_plan(other):
    order, replayed = order_of(), []
    run(order, A, B, replayed=replayed)
    order.step()
    for times in range(3):
        other.sent.clear()
        run(order, A, A)  # the plan has B here: those who keep to it are freed first
        order.step()
        assert replayed == [B] * min(times + 1, 2)
    assert other.sent == [[0, 0, 1]]  # of the new plan
    run(order, A, B)
    assert other.sent[-1][:2] == [2, B.code]


def test_an_evaluation_between_two_steps_is_no_plan(other):
    order, replayed = order_of(), []
    run(order, A, B, replayed=replayed)
    order.step()
    run(order, B)
    assert replayed == [A, B]
    run(order, A, B)
    order.step()
    for _ in range(2):  # the plan is the old one
        other.sent.clear()
        run(order, A, B)
        order.step()
        assert other.sent == [[0, 0, 1]]


def test_a_step_in_the_middle_of_the_plan_frees_those_who_keep_to_it(other, monkeypatch):
    order, replayed, waited = order_of(), [], []
    run(order, A, B, replayed=replayed)
    order.step()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: waited.append(1))
    other.sent.clear()
    run(order, A)
    order.step()
    assert other.sent == [[2, STEP.code, 1]]
    assert (replayed, waited) == ([B], [1])


def test_a_whole_step_without_a_step_was_dropped(other):
    order = order_of()
    run(order, A, B)
    order.step()
    other.sent.clear()
    run(order, A, B)
    run(order, A, B)
    order.step()
    assert other.sent == [[0, 0, 1], [0, 0, 0]]


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_the_first_difference_is_named_with_the_step(other, steps):
    order = order_of()
    for _ in range(steps):
        run(order, A, B)
        order.step()
    run(order, A)
    other.differ = lambda row: [row[0], row[1] + 1, row[2]]
    other.text = [1, "gathers c", bool(steps)]
    with pytest.raises(GradientError, match=rf"step {steps + 1}: .* 4, 6 .*rank 4 gathers d; rank 6 gathers c\."):
        run(order, Event("gathers d"))


def test_a_rank_that_follows_the_plan_is_named_by_what_comes_next_in_it(other):
    order = order_of()
    run(order, A, B)
    order.step()
    other.differ = lambda row: [0, 0, 1]
    other.text = [None, "None", True]
    with pytest.raises(GradientError, match=r"rank 4 gathers b; rank 6 gathers a\."):
        run(order, B)


def test_a_step_more_on_one_rank_is_told(other):
    order = order_of()
    run(order, A, B)
    order.step()
    other.differ = lambda row: [row[0], row[1], 1 - row[2]]
    run(order, A, B)
    with pytest.raises(GradientError, match="another number of optimizer steps has been taken"):
        order.step()


def test_what_has_a_gradient_is_said_only_where_it_is_not_all():
    names = ("x", "y", "z")
    assert str(Event("reduces a", 0b101, names)) == "reduces a, of it x, z"
    assert str(Event("reduces a", 0b111, names)) == "reduces a"
    assert str(Event("reduces a", 0, names)) == "reduces a"
    assert Event("reduces a", 1, names).code != Event("reduces a", 2, names).code
    assert Event("reduces a", 1, names) == Event("reduces a", 1)


def test_a_gathered_parameter_tells_once_that_it_has_a_gradient():
    layer = torch.nn.Linear(2, 2)
    member = fsdp_checks.Member("weight", layer, layer.weight, layer.weight)
    noted: list[object] = []
    for _ in range(2):  # in forward, and again in backward
        assert member.gathered(noted.append) is layer.weight
    layer(torch.ones(1, 2)).sum().backward()
    assert len(noted) == 1
    layer.weight.requires_grad_(False)
    assert member.gathered(noted.append) is layer.weight

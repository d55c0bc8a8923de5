"""The order of collectives among two ranks, of which one is told: what it says at each place, and when it asks."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from colonnade.errors import GradientError
from colonnade.optim.zero import fsdp_checks
from colonnade.optim.zero.fsdp_checks import STEP, Event, RunOrder

A, B, C = Event("gathers a"), Event("gathers b"), Event("gathers c")


class Other:
    """Rank 1: says what rank 0 says, unless `differ` changes the row (place, code, whether it stepped)."""

    def __init__(self) -> None:
        self.differ: Callable[[list[int]], list[int]] = list
        self.text: list[Any] = []
        self.sent: list[list[int]] = []

    def gather(self, everyone: Tensor, mine: Tensor) -> Any:
        self.sent.append(mine[0].tolist())
        come = torch.tensor([self.sent[-1], self.differ(self.sent[-1])])
        everyone.zero_()  # until somebody waits for it
        return SimpleNamespace(wait=lambda: everyone.copy_(come))


@pytest.fixture
def other(monkeypatch):
    rank = Other()
    monkeypatch.setattr(fsdp_checks.dist, "get_process_group_ranks", lambda group: [4, 6])
    monkeypatch.setattr(fsdp_checks, "separate_gloo_gather", lambda group: rank.gather)
    monkeypatch.setattr(fsdp_checks, "gather_json_by", lambda gather, size, mine: [mine, rank.text or mine])
    return rank


def order_of() -> RunOrder:
    return RunOrder(None)  # type: ignore[arg-type]


def run(order: RunOrder, *events: Event, replayed: list[Event] | None = None) -> None:
    for event in events:
        order.issue(event, lambda event=event: (replayed if replayed is not None else []).append(event))


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
    other.differ = lambda row: [row[0], row[1], 1 - row[2]]
    run(order, A, B)
    with pytest.raises(GradientError, match="the numbers of optimizer steps differ"):
        run(order, A)  # what was said at the end of the plan is read before it begins again


def test_what_was_said_in_a_backward_pass_is_read_at_its_end(other):
    order = order_of()
    run(order, A)
    order.step()
    other.differ = lambda row: [row[0], row[1], 1 - row[2]]
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: run(order, A))
    with pytest.raises(GradientError, match="the numbers of optimizer steps differ"):
        y.sum().backward()


@pytest.mark.parametrize("followed", [0, 2])
def test_once_is_no_plan_and_twice_in_a_row_is_one_however_long_the_plan_was_kept(other, followed):
    order, plan = order_of(), [A, B]
    run(order, *plan)
    order.step()

    def steps(events: list[Event], count: int, sent: int) -> None:
        for _ in range(count):
            other.sent.clear()
            run(order, *events)
            order.step()
            assert len(other.sent) == sent

    for new in ([A, A], [A, C], [A, B]):
        steps(plan, followed, 1)
        steps(new, 1, 2)  # leaves the plan, and compares each one after that
        steps(plan, 1 + followed, 1)  # is still the plan
        steps(new, 2, 2)
        steps(new, 1, 1)
        plan = new


@pytest.mark.parametrize(
    ("plan", "mine", "theirs", "told"),
    [
        ([A, B], [], [1, "gathers c", True], r"rank 4 gathers d; rank 6 gathers a\."),  # the first place counts
        ([A, B], [A], [0, "gathers c", True], r"rank 4 gathers a; rank 6 gathers c\."),
        ([A, B], [A, A], [3, "gathers c", False], r"rank 4 gathers d; rank 6 steps the optimizer\."),  # after the plan
        ([A, B], [A], [1, "gathers c", False], r"rank 4 gathers d, after a step; rank 6 gathers c, without a step\."),
    ],
)
def test_the_first_place_where_ranks_part_is_told(other, plan, mine, theirs, told):
    order = order_of()
    run(order, *plan)
    order.step()
    run(order, *mine)
    other.differ = lambda row: [row[0], row[1] + 1, row[2]]
    other.text = theirs
    with pytest.raises(GradientError, match=told):
        run(order, Event("gathers d"))


def test_a_step_more_on_one_rank_is_told(other):
    order = order_of()
    run(order, A, B)
    order.step()
    other.differ = lambda row: [row[0], row[1], 1 - row[2]]
    run(order, A, B)
    with pytest.raises(GradientError, match="the numbers of optimizer steps differ"):
        order.step()


def test_what_has_a_gradient_is_said_only_where_it_is_not_all():
    names = ("x", "y", "z")
    assert str(Event("reduces a", 0b101, names)) == "reduces a, of these x, z"
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

"""A synchroniser in one process: which groups share memory, what is refused, and what is noticed of gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from colonnade.errors import GradientError
from colonnade.gradients import synchroniser
from colonnade.gradients.sums import Sum, SyncOptions
from colonnade.gradients.synchroniser import Synchroniser, open_groups
from colonnade.gradients.uneven import PiggybackedFlags


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


def test_parameters_of_two_sums_and_divisors_that_are_none_are_refused():
    parameter = nn.Parameter(torch.zeros(1))
    one = Sum(("a",), (parameter,), (0,), None, 0.5)
    assert open_groups([one], print)
    for wrong in ([one, replace(one, names=("b",))], [replace(one, divisor=0.0)], [replace(one, divisor=-0.5)]):
        with pytest.raises(GradientError, match=r"is in two reductions|a divisor must be greater than 0"):
            open_groups(wrong, print)


def test_a_group_that_must_share_and_cannot_is_an_error_after_the_others_were_opened(monkeypatch):
    made: list[Group] = []
    monkeypatch.setattr(synchroniser, "RankGroup", lambda *args: made.append(Group(*args)) or made[-1])
    with pytest.raises(GradientError, match="three cannot share"):
        opened((3, "cpu", {"shared_memory": True}), (4, "cpu", {}))
    assert [group.asked for group in made] == [True, False]
    assert all(group.closed for group in made)


# -- passes ---
SMALL = SyncOptions(bucket_mb=64 / 2**20, first_bucket_mb=32 / 2**20)


def alone(*numels: int, **more: Any) -> tuple[Synchroniser, tuple[nn.Parameter, ...]]:
    parameters = tuple(nn.Parameter(torch.zeros(numel)) for numel in numels)
    names = tuple(f"p{at}" for at in range(len(numels)))
    return Synchroniser(
        [Sum(names, parameters, (0,), None, 2.0, SMALL, **more)], log=more.pop("log", print)
    ), parameters


def backward(parameters: tuple[nn.Parameter, ...], value: float = 4.0) -> None:
    sum((value * parameter).sum() for parameter in parameters).backward()


@pytest.mark.parametrize("change", [None, "written", "replaced", "taken", "given"])
def test_gradients_that_are_changed_between_backward_and_step_are_refused(change):
    reducer, (first, second) = alone(8, 8)
    for _ in range(2):
        first.grad = second.grad = None
        reducer.prepare(last=True)
        backward((first,) if change == "given" else (first, second))
        reducer.end_backward()
    match change:
        case "written":
            second.grad.mul_(2)
        case "replaced":
            second.grad = second.grad.clone()
        case "taken":
            second.grad = None
        case "given":
            second.grad = torch.ones(8)
    if change is None:
        reducer.check_untouched()
    else:
        with pytest.raises(GradientError, match="the gradient of 'p1' was changed between backward and step"):
            reducer.check_untouched()
    reducer.check_untouched()  # asked once: from then on handlers may write
    reducer.wait()


def test_a_step_that_flags_dropped_is_logged():
    said: list[str] = []
    parameters = (nn.Parameter(torch.zeros(8)),)
    reducer = Synchroniser([Sum(("p0",), parameters, (0,), None, 2.0, SMALL)], log=said.append)
    flags = PiggybackedFlags(torch.device("cpu"))
    reducer.agree_by(flags)
    unsteady = []
    for step in range(7):
        parameters[0].grad = None
        reducer.prepare(last=True)
        if step != 4:
            backward(parameters)
        outcome = reducer.wait()
        assert outcome.drop_flag is None  # no bucket carried it
        unsteady.append(outcome.unsent_flags[:2].tolist())
        flags.take(outcome.unsent_flags)
    # Unsteady while it learns; in step 4 it is steady, and deviates; from then on it is noted.
    assert unsteady == [[0, 1], [0, 0], [0, 0], [0, 0], [1, 0], [0, 0], [0, 0]]
    assert [text[:18] for text in said] == ["step 4 was skipped"]

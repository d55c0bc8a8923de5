"""A synchroniser in one process: when passes are open, what is noticed of gradients, and what a step leaves behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from colonnade.errors import GradientError
from colonnade.gradients.sums import Sum, SyncOptions
from colonnade.gradients.synchroniser import Synchroniser
from colonnade.gradients.uneven import PiggybackedFlags

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
    assert [text[:18] for text in said] == ["step 4 was dropped"]

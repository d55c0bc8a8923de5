"""Schedulers with a warm-up."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch

from colonnade.errors import ConfigError
from colonnade.nn.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmupLR,
    LinearWarmupLR,
    MultiStepWarmupLR,
    PolynomialWarmupLR,
)
from colonnade.registry import LR_SCHEDULERS


def rates(make, steps):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = make(optimizer)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def test_cosine_from_the_start_value_to_its_floor():
    seen = rates(lambda o: CosineAnnealingLR(o, total_steps=10, eta_min=0.1), 12)
    assert seen[0] == 2.0
    assert seen[5] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert seen[3] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.3))))
    assert seen[10] == seen[11] == pytest.approx(0.2)


def test_the_warm_up_rises_linearly():
    seen = rates(lambda o: LinearWarmupLR(o, total_steps=8, warmup_steps=4), 9)
    assert seen[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert seen[6] == pytest.approx(1.0)
    assert seen[8] == 0.0


def test_they_are_registered_and_refuse_senseless_lengths():
    assert LR_SCHEDULERS.get_module("CosineAnnealingLR") is CosineAnnealingLR
    for total, warmup, is_refused in (
        *((8, 9, True), (8, 8, False), (8, 0, False), (8, -1, True)),
        *((1, 0, False), (1, 1, False), (0, 0, True), (-1, -1, True)),
    ):
        with (
            pytest.raises(ConfigError, match=f"is {total} and warmup_steps is {warmup};")
            if is_refused
            else nullcontext()
        ):
            rates(lambda o, total=total, warmup=warmup: LinearWarmupLR(o, total, warmup), 1)


def test_a_warm_up_may_take_all_steps_but_one_or_all():
    assert rates(lambda o: LinearWarmupLR(o, 3, 2), 5) == [1.0, 2.0, 2.0, 0.0, 0.0]
    assert rates(lambda o: LinearWarmupLR(o, 2, 2), 4) == [1.0, 2.0, 2.0, 0.0]


def test_the_ancestors_order_of_arguments():
    ours = rates(lambda o: CosineAnnealingLR(o, 10, 0.1, 3), 10)
    assert rates(lambda o: CosineAnnealingWarmupLR(o, 10, 3, 0.1), 10) == ours


def test_milestones_multiply_after_the_warm_up():
    seen = rates(lambda o: MultiStepWarmupLR(o, 10, 2, [4, 7], gamma=0.5), 9)
    assert seen == pytest.approx([1.0, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 0.5, 0.5])
    with pytest.raises(ConfigError, match="milestones=\\[1\\]"):
        rates(lambda o: MultiStepWarmupLR(o, 10, 2, [1]), 1)
    for at, is_refused in (
        *(([2], True), ([3], False), ([10], False), ([11], True)),
        *(([5, 3], False), ([5, 1], True), ([11, 3], True), ([3, 3, 10], False)),
    ):
        with pytest.raises(ConfigError, match="must be after the warm-up") if is_refused else nullcontext():
            rates(lambda o, at=at: MultiStepWarmupLR(o, 10, 2, at), 1)


def test_a_polynomial_falls_to_its_end():
    seen = rates(lambda o: PolynomialWarmupLR(o, 8, 0, end=0.25, power=2.0), 10)
    assert seen[4] == pytest.approx(2.0 * (0.25 + 0.75 * 0.25))
    assert seen[8] == seen[9] == pytest.approx(0.5)


@pytest.mark.parametrize(
    "make", [CosineAnnealingLR, CosineAnnealingWarmupLR, LinearWarmupLR, MultiStepWarmupLR, PolynomialWarmupLR]
)
def test_without_a_warm_up_the_first_steps_are_those_of_no_warm_up(make):
    assert rates(lambda o: make(o, total_steps=10), 2) == rates(lambda o: make(o, total_steps=10, warmup_steps=0), 2)
    assert rates(lambda o: make(o, total_steps=10), 2)[0] == 2.0

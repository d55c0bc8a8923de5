"""Schedulers with the ancestor's signatures, step by step against torch's or the formula."""

from __future__ import annotations

import math

import pytest
import torch

from colonnade.compat import old_nn
from colonnade.errors import ConfigError

STEPS, RATE = 10, 0.5


def optimizer(*rates: float) -> torch.optim.SGD:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates or (RATE,)]
    return torch.optim.SGD(groups, lr=RATE, momentum=0.9)


def rates(make) -> list[float]:
    held = optimizer()
    scheduler = make(held)
    found = []
    for _ in range(STEPS):
        found.append(held.param_groups[0]["lr"])
        held.step()
        scheduler.step()
    return found


torchs = torch.optim.lr_scheduler


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (
            lambda o: old_nn.MultiStepLR(o, STEPS, milestones=[3, 6], gamma=0.2),
            lambda o: torchs.MultiStepLR(o, [3, 6], 0.2),
        ),
        (lambda o: old_nn.MultiStepLR(o, STEPS), lambda o: torchs.MultiStepLR(o, [])),
        (lambda o: old_nn.StepLR(o, STEPS, 2, 0.5), lambda o: torchs.StepLR(o, 2, 0.5)),
        (lambda o: old_nn.ExponentialLR(o, STEPS, gamma=0.9), lambda o: torchs.ExponentialLR(o, 0.9)),
        (
            lambda o: old_nn.OneCycleLR(o, STEPS, pct_start=0.5),
            lambda o: torchs.OneCycleLR(o, RATE, STEPS, pct_start=0.5),
        ),
        (
            lambda o: old_nn.PolynomialLR(o, STEPS, end_lr=0.1, power=2),
            lambda o: torchs.LambdaLR(o, lambda step: (0.1 + 0.4 * (1 - step / STEPS) ** 2) / RATE),
        ),
        (
            lambda o: old_nn.CosineAnnealingLR(o, STEPS, eta_min=0.1),
            lambda o: torchs.CosineAnnealingLR(o, STEPS, eta_min=0.1),
        ),
        (
            lambda o: old_nn.CosineAnnealingWarmupLR(o, STEPS, 2, eta_min=0.1),
            lambda o: torchs.LambdaLR(
                o,
                lambda step: (
                    min(1, (step + 1) / 2) * (0.1 + 0.2 * (1 + math.cos(math.pi * max(0, step - 2) / 8))) / RATE
                ),
            ),
        ),
    ],
)
def test_the_same_rates_at_every_step(ours, theirs) -> None:
    assert rates(ours) == pytest.approx(rates(theirs), rel=1e-12)


def test_one_last_rate_for_groups_of_other_rates_is_refused() -> None:
    old_nn.CosineAnnealingLR(optimizer(0.1, 0.2), STEPS)
    with pytest.raises(
        ConfigError,
        match=r"eta_min is 0\.1, but the parameter groups have the different initial learning rates \[0\.1, 0\.2\]",
    ):
        old_nn.CosineAnnealingLR(optimizer(0.1, 0.2), STEPS, eta_min=0.1)

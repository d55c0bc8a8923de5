"""`colossalai.nn.lr_scheduler`: torch's schedulers with `total_steps` as their second argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch.optim import Optimizer
from torch.optim import lr_scheduler as torch_schedulers

from colonnade.errors import ConfigError
from colonnade.nn import lr_scheduler as ours


class MultiStepLR(torch_schedulers.MultiStepLR):
    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        milestones: Sequence[int] | None = None,
        gamma: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(optimizer, list(milestones or ()), gamma, last_epoch)


class StepLR(torch_schedulers.StepLR):
    def __init__(
        self, optimizer: Optimizer, total_steps: int, step_size: int = 1, gamma: float = 0.1, last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, step_size, gamma, last_epoch)


class ExponentialLR(torch_schedulers.ExponentialLR):
    def __init__(self, optimizer: Optimizer, total_steps: int, gamma: float = 1.0, last_epoch: int = -1) -> None:
        super().__init__(optimizer, gamma, last_epoch)


class OneCycleLR(torch_schedulers.OneCycleLR):
    """The cycle's highest rates are those of the optimizer's groups."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        pct_start: float = 0.3,
        anneal_strategy: Literal["cos", "linear"] = "cos",
        cycle_momentum: bool = True,
        base_momentum: float = 0.85,
        max_momentum: float = 0.95,
        div_factor: float = 25.0,
        final_div_factor: float = 10000.0,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(
            optimizer,
            [group["lr"] for group in optimizer.param_groups],
            total_steps,
            pct_start=pct_start,
            anneal_strategy=anneal_strategy,
            cycle_momentum=cycle_momentum,
            base_momentum=base_momentum,
            max_momentum=max_momentum,
            div_factor=div_factor,
            final_div_factor=final_div_factor,
            last_epoch=last_epoch,
        )


class PolynomialLR(ours.PolynomialWarmupLR):
    """Down to the rate `end_lr` at `total_steps`, by (1 - progress) ** power."""

    def __init__(
        self, optimizer: Optimizer, total_steps: int, end_lr: float = 0.0001, power: float = 1.0, last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, total_steps, 0, _factor(optimizer, "end_lr", end_lr), power, last_epoch)


class CosineAnnealingLR(ours.CosineAnnealingLR):
    """`eta_min` is a rate, not a share of the first one."""

    def __init__(self, optimizer: Optimizer, total_steps: int, eta_min: float = 0, last_epoch: int = -1) -> None:
        super().__init__(optimizer, total_steps, _factor(optimizer, "eta_min", eta_min), last_epoch=last_epoch)


class CosineAnnealingWarmupLR(ours.CosineAnnealingWarmupLR):
    """`eta_min` is a rate, not a share of the first one."""

    def __init__(
        self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, eta_min: float = 0.0, last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, total_steps, warmup_steps, _factor(optimizer, "eta_min", eta_min), last_epoch)


def _factor(optimizer: Optimizer, name: str, rate: float) -> float:
    """A last learning rate as a share of the first."""
    first = {group.get("initial_lr", group["lr"]) for group in optimizer.param_groups}
    if rate and len(first) > 1:
        raise ConfigError(
            f"{name}={rate} is one rate for groups that begin with {sorted(first)}; use 0, or equal rates"
        )
    return rate / first.pop() if rate else 0.0

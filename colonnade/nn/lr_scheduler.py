"""Learning-rate schedulers with a warm-up, on the number of steps of the whole run."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from colonnade.errors import ConfigError
from colonnade.registry import LR_SCHEDULERS


def _warm_up(step: int, steps: int) -> float:
    """From 1/steps up to 1; 1 without a warm-up."""
    return min(1.0, (step + 1) / steps) if steps else 1.0


def _progress(step: int, warmup: int, total: int) -> float:
    """How far the run is after its warm-up: 0 to 1."""
    return min(1.0, max(0.0, (step - warmup) / max(1, total - warmup)))


def _check(total_steps: int, warmup_steps: int) -> None:
    if total_steps < 1 or not 0 <= warmup_steps <= total_steps:
        raise ConfigError(
            f"total_steps={total_steps} and warmup_steps={warmup_steps}: a run has at least one step, and its warm-up is a "
            f"part of it"
        )


@LR_SCHEDULERS.register_module
class CosineAnnealingLR(LambdaLR):
    """Half a cosine from the start value down to `eta_min` times it, after `warmup_steps` of a linear rise."""

    def __init__(
        self, optimizer: Optimizer, total_steps: int, eta_min: float = 0.0, warmup_steps: int = 0, last_epoch: int = -1
    ) -> None:
        _check(total_steps, warmup_steps)

        def factor(step: int) -> float:
            wave = 0.5 * (1 + math.cos(math.pi * _progress(step, warmup_steps, total_steps)))
            return _warm_up(step, warmup_steps) * (eta_min + (1 - eta_min) * wave)

        super().__init__(optimizer, factor, last_epoch)


@LR_SCHEDULERS.register_module
class LinearWarmupLR(LambdaLR):
    """A linear rise over `warmup_steps`, then a linear fall to zero at `total_steps`."""

    def __init__(self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, last_epoch: int = -1) -> None:
        _check(total_steps, warmup_steps)

        def factor(step: int) -> float:
            return _warm_up(step, warmup_steps) * (1 - _progress(step, warmup_steps, total_steps))

        super().__init__(optimizer, factor, last_epoch)


@LR_SCHEDULERS.register_module
class CosineAnnealingWarmupLR(CosineAnnealingLR):
    """`CosineAnnealingLR` with the warm-up second among its arguments, as the ancestor has it."""

    def __init__(
        self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, eta_min: float = 0.0, last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, total_steps, eta_min, warmup_steps, last_epoch)


@LR_SCHEDULERS.register_module
class MultiStepWarmupLR(LambdaLR):
    """A linear rise over `warmup_steps`; then times `gamma` at each of the `milestones`, which are steps of the run."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        milestones: Sequence[int] = (),
        gamma: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        _check(total_steps, warmup_steps)
        ordered = sorted(milestones)
        if ordered and not warmup_steps < ordered[0] <= ordered[-1] <= total_steps:
            raise ConfigError(
                f"milestones={list(milestones)} lie after the warm-up of {warmup_steps} and within {total_steps} steps"
            )

        def factor(step: int) -> float:
            return _warm_up(step, warmup_steps) * float(gamma ** bisect_right(ordered, step))

        super().__init__(optimizer, factor, last_epoch)


@LR_SCHEDULERS.register_module
class PolynomialWarmupLR(LambdaLR):
    """A linear rise over `warmup_steps`, then (1 - progress) ** `power` down to `end` times the start value."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        end: float = 0.0,
        power: float = 1.0,
        last_epoch: int = -1,
    ) -> None:
        _check(total_steps, warmup_steps)

        def factor(step: int) -> float:
            left = (1 - _progress(step, warmup_steps, total_steps)) ** power
            return _warm_up(step, warmup_steps) * (end + (1 - end) * left)

        super().__init__(optimizer, factor, last_epoch)

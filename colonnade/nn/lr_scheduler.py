"""Learning-rate schedulers with a warm-up, on the number of steps of the whole run."""

from __future__ import annotations

import math

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

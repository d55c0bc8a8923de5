"""Learning-rate schedulers with warm-up over the steps of the full run, as factors for torch's LambdaLR."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from colonnade.errors import ConfigError
from colonnade.registry import LR_SCHEDULERS


class _WarmupLR(LambdaLR):
    """A linear warm-up from 1/warmup_steps to 1, times `factor(step, progress)`; progress goes from 0 to 1 after it."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int,
        factor: Callable[[int, float], float],
        last_epoch: int,
    ) -> None:
        if total_steps < 1 or not 0 <= warmup_steps <= total_steps:
            raise ConfigError(
                f"total_steps is {total_steps} and warmup_steps is {warmup_steps}; total_steps must be at least 1, "
                "and warmup_steps must be from 0 to total_steps"
            )

        def at(step: int) -> float:
            rise = min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0
            progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
            return rise * factor(step, min(1.0, max(0.0, progress)))

        super().__init__(optimizer, at, last_epoch)


@LR_SCHEDULERS.register_module
class CosineAnnealingLR(_WarmupLR):
    """Linear warm-up over `warmup_steps`, then half a cosine from the base rate down to `eta_min` times the base rate."""

    def __init__(
        self, optimizer: Optimizer, total_steps: int, eta_min: float = 0.0, warmup_steps: int = 0, last_epoch: int = -1
    ) -> None:
        def factor(step: int, progress: float) -> float:
            return eta_min + (1 - eta_min) * 0.5 * (1 + math.cos(math.pi * progress))

        super().__init__(optimizer, total_steps, warmup_steps, factor, last_epoch)


@LR_SCHEDULERS.register_module
class CosineAnnealingWarmupLR(CosineAnnealingLR):
    """`CosineAnnealingLR` with `warmup_steps` as the third argument, as in Colossal-AI."""

    def __init__(
        self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, eta_min: float = 0.0, last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, total_steps, eta_min, warmup_steps, last_epoch)


@LR_SCHEDULERS.register_module
class PolynomialWarmupLR(_WarmupLR):
    """Linear warm-up over `warmup_steps`, then (1 - progress) ** `power` down to `end` times the base rate."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        end: float = 0.0,
        power: float = 1.0,
        last_epoch: int = -1,
    ) -> None:
        def factor(step: int, progress: float) -> float:
            return float(end + (1 - end) * (1 - progress) ** power)

        super().__init__(optimizer, total_steps, warmup_steps, factor, last_epoch)


@LR_SCHEDULERS.register_module
class LinearWarmupLR(PolynomialWarmupLR):
    """Linear warm-up over `warmup_steps`, then linear decay to zero at `total_steps`."""

    def __init__(self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, last_epoch: int = -1) -> None:
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch=last_epoch)


@LR_SCHEDULERS.register_module
class MultiStepWarmupLR(_WarmupLR):
    """Linear warm-up over `warmup_steps`; then a multiplication by `gamma` at each of the `milestones`, given as steps."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        milestones: Sequence[int] = (),
        gamma: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        ordered = sorted(milestones)
        if ordered and not warmup_steps < ordered[0] <= ordered[-1] <= total_steps:
            raise ConfigError(
                f"milestones are {list(milestones)}; each must be after the warm-up ({warmup_steps} steps) and "
                f"within total_steps={total_steps}"
            )

        def factor(step: int, progress: float) -> float:
            return float(gamma ** bisect_right(ordered, step))

        super().__init__(optimizer, total_steps, warmup_steps, factor, last_epoch)

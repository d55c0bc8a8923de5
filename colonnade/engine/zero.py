"""ZeRO as an engine uses it: parameters sharded before the optimizer is built (stage 3), or the optimizer (1 and 2)."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import ConfigError, listed
from colonnade.logging import get_dist_logger
from colonnade.optim.zero.fsdp import Sharding, shard_model
from colonnade.optim.zero.optimizer import ZeroOptimizer
from colonnade.optim.zero.settings import ZeroSettings
from colonnade.parallel.agreement import check_placements


def shard_parameters(
    model: nn.Module, optimizer: Any, context: ParallelContext, settings: ZeroSettings
) -> Sharding | None:
    """At stage 3: FSDP2 on the model, in place; an optimizer that was built before gets the new parameters."""
    if settings.stage != 3:
        return None
    sharding = shard_model(model, context, settings)
    if hasattr(optimizer, "param_groups"):
        sharding.carry_over(optimizer)
    check_placements(model, context)
    whole = f"; whole on every rank: {listed(sharding.whole)}" if sharding.whole else ""
    get_dist_logger().info(f"ZeRO stage 3: {sharding.units} modules are gathered one by one (FSDP2){whole}")
    return sharding


def shard_optimizer(optimizer: Any, model: nn.Module, settings: ZeroSettings, flat: bool | None) -> Any:
    """The optimizer, sharded where the settings say stage 1 or 2."""
    if settings.stage not in (1, 2):
        return optimizer
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"zero stages 1 and 2 shard a torch optimizer, not {type(optimizer).__name__}; give one, or turn zero off",
            code="C070",
        )
    return ZeroOptimizer(optimizer, model, settings, flat)

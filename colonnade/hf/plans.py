"""The plan that a model brings along."""

from __future__ import annotations

from typing import Any

from torch import nn

from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode


def plan_of(model: nn.Module, context: ParallelContext) -> dict[str, Any]:
    """What `parallelize` does to the model where no plan is given; empty if the model brings none along.

    Where there is expert parallelism, what the expert plan names is no longer the tensor plan's.
    """
    plan = dict(getattr(model, "tp_plan", None) or {})
    experts = context.get_world_size(ParallelMode.EXPERT) if context.is_initialized(ParallelMode.EXPERT) else 1
    if experts == 1:
        return plan
    own = dict(getattr(model, "ep_plan", None) or {})
    kept = {name: style for name, style in plan.items() if not any(f"{name}.".startswith(f"{other}.") for other in own)}
    return {**kept, **own}

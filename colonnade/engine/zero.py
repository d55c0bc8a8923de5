"""ZeRO as an engine uses it: the `zero` key, the options of `sync`, and the engine's own parties and shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.gradient_handler._lane import keep_heap
from colonnade.engine.gradient_handler._options import SyncOptions
from colonnade.engine.gradient_handler._party import Party
from colonnade.engine.gradient_handler._settings import read_options
from colonnade.engine.gradient_handler._shared_memory import allocate_shared
from colonnade.errors import ConfigError, listed
from colonnade.logging import get_dist_logger
from colonnade.optim.zero.fsdp import Sharding, shard_model
from colonnade.optim.zero.optimizer import ZeroOptimizer
from colonnade.optim.zero.settings import Travel, ZeroSettings, refuse_options
from colonnade.optim.zero.team import Means
from colonnade.parallel.agreement import check_placements

_NO_OPTIONS_OF_SUMS = ("automatic", "waive")


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


def shard_optimizer(
    optimizer: Any, model: nn.Module, context: ParallelContext, settings: ZeroSettings, flat: bool | None
) -> Any:
    """The optimizer, sharded where the settings say stage 1 or 2. Collective over the world."""
    if settings.stage not in (1, 2):
        return optimizer
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"zero stages 1 and 2 shard a torch optimizer, not {type(optimizer).__name__}; give one, or turn zero off"
        )
    options: Mapping[str, Any] = context.config.get("sync") or {}
    refuse_options(options, ("callback",))
    chosen = read_options({key: value for key, value in options.items() if key not in _NO_OPTIONS_OF_SUMS})
    keep_heap()
    means = Means(Party, allocate_shared, get_dist_logger().info)
    sharded = ZeroOptimizer(optimizer, model, context, settings, means, _travel(chosen), flat)
    get_dist_logger().info(
        f"ZeRO stage {settings.stage}: {type(optimizer).__name__} steps on {sharded.numel} of "
        f"{sum(p.numel() for p in model.parameters())} elements here"
    )
    return sharded


def _travel(options: SyncOptions) -> Travel:
    compression = options.compression
    if compression is not None and not isinstance(compression, torch.dtype):
        refuse_options({"compress": options.compress}, ("compress",))
    return Travel(
        shared_memory=options.shared_memory,
        overlap=options.overlap is not False,
        wire=compression if isinstance(compression, torch.dtype) else None,
        reduce_dtype=options.reduce_dtype,
        fixed_order=options.fixed_order,
    )

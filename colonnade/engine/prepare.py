"""The part of `initialize` that needs no other rank: it prepares the model, the optimizer and the gradient reductions of one rank.

`initialize` calls these functions and then communicates. `colonnade plan` and `colonnade explain` call the same functions
for one rank of each kind, on a model without memory, and do not communicate. So all three change a model in the same order, read
the same settings, find the same handlers, and raise the same errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from colonnade.config import Config
from colonnade.config.settings import ActivationSettings, Float8Settings, SyncSettings, ZeroSettings
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.activations import apply_activations
from colonnade.engine.checks import (
    refuse_lazy,
    refuse_non_elementwise,
    refuse_optimizer,
    warn_of_batch_norm,
    warn_of_repeated_work,
)
from colonnade.engine.model import TrainingLoss, refuse_unfit, training_loss_of
from colonnade.engine.precision import Precision, convert_to_float8
from colonnade.engine.schedule.schedules import BaseSchedule, PipelineSchedule
from colonnade.errors import ColonnadeError, ConfigError, GradientError
from colonnade.gradients.handler import BuiltHandler, build_handlers
from colonnade.gradients.sums import Shards
from colonnade.optim.engine_optimizer import EngineOptimizer, PlainOptimizer
from colonnade.optim.zero.zero_optimizer import ZeroOptimizer
from colonnade.parallel.held import refuse_colossalai_attributes
from colonnade.parallel.meta import MetaStart, read_inits
from colonnade.parallel.placement import check_ties
from colonnade.parallel.split import Split, take_stages

# --- Settings -----------------------------------------------------------------------------------------


def read_numerics(config: Config) -> tuple[Precision, ZeroSettings]:
    """Read the mixed precision and the ZeRO settings of a config. The ZeRO settings include the dtypes that other sections set."""
    precision = Precision.read(config)
    sync = SyncSettings.read(config.get("sync"))
    zero = replace(
        ZeroSettings.read(config.get("zero")),
        master_weights=precision.master_weights,
        gather_dtype=precision.dtype,
        # Stage 3 reduces gradients itself (FSDP2), in a single dtype: the one in which they are sent, if `sync` sets one.
        reduce_dtype=sync.narrow or sync.reduce_dtype,
    )
    return precision, zero


# --- The model ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stages:
    """A model as the user passed it: all pipeline stages (from `colonnade.split`), or the single module that this rank has
    built."""

    given: nn.Module | Split
    modules: list[nn.Module]

    @property
    def was_split(self) -> bool:
        """Whether `colonnade.split` made the stages."""
        return isinstance(self.given, Split)

    def own(self, context: ParallelContext, schedule: BaseSchedule | None) -> nn.Module:
        """The stage of this rank; under an interleaved schedule, all stages (chunks) of this rank."""
        if not isinstance(self.given, Split):
            return self.given
        if not isinstance(schedule, PipelineSchedule):
            raise ConfigError(
                f"the model is split into {len(self.modules)} stages, but the schedule {type(schedule).__name__} "
                "does not run a pipeline. Set a pipeline schedule, such as schedule=dict(type='OneFOneB', "
                "num_microbatches=8), or pass the model without split()."
            )
        stage = context.get_local_rank(ParallelMode.PIPELINE)
        return take_stages(self.given, schedule.stage_ranks(context.pipeline_parallel_size), stage)


def read_stages(model: nn.Module | Split | Callable[[], nn.Module | Split]) -> Stages:
    """Build the model if it is a function, and check its parameters: all must have a shape, and tied weights must be declared.

    Raises:
        ConfigError: the result is neither a module nor a `Split`, or a parameter has no shape yet.
    """
    built = model if isinstance(model, (nn.Module, Split)) else model()
    if not isinstance(built, (nn.Module, Split)):
        raise ConfigError(
            f"model is a {type(built).__name__}; pass a torch.nn.Module, the result of colonnade.split, or a "
            "function that returns one of these two"
        )
    stages = Stages(built, list(built) if isinstance(built, Split) else [built])
    refuse_lazy(stages.modules)
    # All stages together: weights that were tied before the split may be in two of them.
    check_ties(stages.modules)
    return stages


def prepare_model(
    stages: Stages, context: ParallelContext, schedule: BaseSchedule | None, device: torch.device | None
) -> tuple[nn.Module, MetaStart]:
    """Take this rank's stage of a model and apply the settings that change modules. `Precision.apply` sets dtypes later.

    Args:
        stages: the model, from `read_stages`.
        context: the context of this rank.
        schedule: the schedule of the config; None if it cannot be built, which is an error for a model from `split`.
        device: the device to train on. None for plans and explanations: the model stays without memory, and warnings
            about its training are omitted.

    Returns:
        (the model of this rank, the initialization of its parameters on the meta device).
    """
    config = context.config
    # Before the rank takes its stage, since parameter names are those of the unsplit model.
    inits = read_inits(stages.given, context) if device is not None else {}
    model = stages.own(context, schedule)
    # If every rank builds its own stage, this rank knows only one of them, and another may have the blocks to checkpoint.
    complete = len(stages.modules) > 1 or context.pipeline_parallel_size == 1
    activations = ActivationSettings.read(config.get("activation_checkpoint"))
    apply_activations(model, activations, stages.modules, complete)
    refuse_colossalai_attributes(model, context)
    refuse_unfit(model)
    if device is None:
        return model, MetaStart(model, {}, context)
    warn_of_batch_norm(model, context)
    warn_of_repeated_work(model, context)
    # Parameters on the meta device get memory after sharding, only for the shards of this rank.
    model = model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device)) if inits else model.to(device)
    float8 = Float8Settings.read(config.get("float8"))
    if float8 is not None:
        convert_to_float8(model, float8, device)
    return model, MetaStart(model, inits, context)


def read_losses(model: nn.Module, criterion: Any, schedule: BaseSchedule) -> tuple[Any, TrainingLoss | None]:
    """Determine how the loss is computed. Returns (criterion, the model's own loss or None).

    The model's own loss is used if no criterion is given. In a pipeline, it also becomes the criterion of the last stage.
    """
    own = training_loss_of(model) if criterion is None else None
    if own is None or not isinstance(schedule, PipelineSchedule):
        return criterion, own
    own.require_pipeline()
    return own, own


# --- The optimizer and the handlers -------------------------------------------------------------------


def prepare_optimizer(
    optimizer: Any, model: nn.Module, context: ParallelContext, others: Sequence[nn.Module] = ()
) -> Any:
    """Build the optimizer if it is a function, and check it. Its parameters may also belong to `others`, the other stages."""
    built = optimizer if hasattr(optimizer, "param_groups") else optimizer(model.parameters())
    if not hasattr(built, "step") or not hasattr(built, "param_groups"):
        raise ConfigError(
            f"optimizer is a {type(built).__name__}; pass a torch optimizer, or a function that takes the parameters "
            "and returns an optimizer"
        )
    if getattr(built, "is_sharded_elsewhere", False):
        raise GradientError(
            "the optimizer was sharded by an earlier initialize(), and the engine of that call owns its state. Build "
            "a new optimizer. To continue with the old state, call load_state_dict(engine.optimizer.state_dict()) on "
            "the new optimizer.",
            code="C070",
        )
    refuse_optimizer(built, [model, *others], context)
    refuse_non_elementwise(built, model, context)
    return built


@dataclass(frozen=True)
class SumSettings:
    """The inputs of `gradients.handler.plan_sums`, in addition to model, layout and the `sync` options."""

    optimizer: EngineOptimizer | None
    """The optimizer as the engine drives it, sharded at ZeRO stages 1 and 2; None if none was given."""
    handlers: list[BuiltHandler]
    bucket_all: bool
    """Whether gradients without a reduction are in buckets too, because the flat step reads them there."""
    shards: Shards | None

    @property
    def user_optimizer(self) -> Any:
        return None if self.optimizer is None else self.optimizer.user_optimizer


def prepare_sums(
    model: nn.Module,
    optimizer: Any,
    context: ParallelContext,
    zero: ZeroSettings,
    *,
    planned_on: str | None = None,
    failed: Callable[[str, ColonnadeError], None] | None = None,
) -> SumSettings:
    """Build the handlers of the config, wrap the optimizer for its ZeRO stage, and decide which gradients are in buckets.

    Args:
        model: the model of this rank.
        optimizer: the user's optimizer; None, as in `colonnade explain`, means no sharding and no flat step.
        context: the context of this rank.
        zero: the settings from `read_numerics`.
        planned_on: the device type ("cpu", "cuda") of the machine that a plan is for.
        failed: passed to `build_handlers`.
    """
    config = context.config
    driven: EngineOptimizer | None = None
    if zero.stage in (1, 2) and optimizer is not None:
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                f"ZeRO stages 1 and 2 shard a torch optimizer, but optimizer is a {type(optimizer).__name__}. Pass a "
                "torch optimizer, or turn zero off.",
                code="C070",
            )
        driven = ZeroOptimizer(optimizer, model, zero, config.get("flat_step"))
    elif optimizer is not None:
        driven = PlainOptimizer(optimizer, model, config.get("flat_step"))
    shards = driven.plan_shards(pipeline=context.pipeline_parallel_size > 1) if driven is not None else None

    # Handlers get the optimizer that steps: one with `sync_grad()` brings a handler of its own.
    named = list(config.get("gradient_handler") or config.get("gradient_handlers") or ())
    handlers = build_handlers(named, model, None if driven is None else driven.user_optimizer, context, failed)
    bucket_all = driven is not None and driven.needs_buckets(planned_on)
    return SumSettings(driven, handlers, bucket_all, shards)

"""From a model, an optimizer and a config to what one rank trains: everything of `initialize` that needs no other rank.

`initialize` calls these functions and then talks to the other ranks. `colonnade plan` and `colonnade explain` call the same
functions for one rank of each kind, on a model without memory, and stop there: so all three change a model in the same
order, read the same settings and know the same handlers, and what one refuses all refuse, in the same words.
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
    refuse_optimizer,
    refuse_parts,
    warn_of_batch_norm,
    warn_of_repeated_work,
)
from colonnade.engine.materialise import MetaStart, read_recipes
from colonnade.engine.model import TrainingLoss, refuse_unfit, training_loss_of
from colonnade.engine.precision import Precision, convert_to_float8
from colonnade.engine.schedule.base import BaseSchedule
from colonnade.engine.schedule.pipeline import PipelineSchedule
from colonnade.errors import ColonnadeError, ConfigError, GradientError
from colonnade.gradients.handler import BuiltHandler, build_handlers
from colonnade.gradients.sums import Shards
from colonnade.optim.engine_optimizer import EngineOptimizer, PlainOptimizer
from colonnade.optim.zero.zero_optimizer import ZeroOptimizer
from colonnade.parallel.dtensor import check_ties
from colonnade.parallel.held import refuse_marks
from colonnade.parallel.split import Split, take_stages

# --- Settings -----------------------------------------------------------------------------------------


def read_numerics(config: Config) -> tuple[Precision, ZeroSettings]:
    """The dtypes of the config, and its ZeRO settings with the dtypes that other sections decide."""
    precision = Precision.read(config)
    sync = SyncSettings.read(config.get("sync"))
    zero = replace(
        ZeroSettings.read(config.get("zero")),
        master_weights=precision.master_weights,
        gather_dtype=precision.dtype,
        # Stage 3 reduces gradients itself (FSDP2), in one dtype: that in which they are sent, if it is another.
        reduce_dtype=sync.narrow or sync.reduce_dtype,
    )
    return precision, zero


# --- The model ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stages:
    """A model as it was given: all its stages, or the one module that this rank has built."""

    given: nn.Module | Split
    modules: list[nn.Module]

    @property
    def was_split(self) -> bool:
        """Whether `colonnade.split` made the stages."""
        return isinstance(self.given, Split)

    def own(self, context: ParallelContext, schedule: BaseSchedule | None) -> nn.Module:
        """The part of the rank that `context` is."""
        if not isinstance(self.given, Split):
            return self.given
        if not isinstance(schedule, PipelineSchedule):
            raise ConfigError(
                f"the model is split into {len(self.modules)} stages, but {type(schedule).__name__} runs no pipeline; choose one, as "
                f"in schedule=dict(type='OneFOneB', num_microbatches=8), or pass the whole model"
            )
        stage = context.get_local_rank(ParallelMode.PIPELINE)
        return take_stages(self.given, schedule.stage_ranks(context.pipeline_parallel_size), stage)


def read_stages(model: nn.Module | Split | Callable[[], nn.Module | Split]) -> Stages:
    """The stages of what a user gives as a model; a model whose weights are not what they seem is refused."""
    built = model if isinstance(model, (nn.Module, Split)) else model()
    if not isinstance(built, (nn.Module, Split)):
        raise ConfigError(
            f"model is a torch.nn.Module, what colonnade.split returns, or a function that returns one of these, not "
            f"{type(built).__name__}"
        )
    stages = Stages(built, list(built) if isinstance(built, Split) else [built])
    refuse_lazy(stages.modules)
    # Of all stages at once: weights that were tied before the cut may lie in two of them.
    check_ties(stages.modules)
    return stages


def prepare_model(
    stages: Stages, context: ParallelContext, schedule: BaseSchedule | None, device: torch.device | None
) -> tuple[nn.Module, MetaStart]:
    """What this rank trains of a model, and how its parameters start. `Precision.apply` sets its dtypes later.

    `device=None` is for plans and explanations: the model stays without memory, and nobody is warned of how it will train.
    `schedule=None`: the config's cannot be built, which is an error for stages that `colonnade.split` made.
    """
    config = context.config
    # Before the rank takes its stages: names are those of the whole model.
    recipes = read_recipes(stages.given, context) if device is not None else {}
    model = stages.own(context, schedule)
    # Of a model that each rank builds for itself, a rank of a pipeline knows one stage: another may have the blocks.
    complete = len(stages.modules) > 1 or context.pipeline_parallel_size == 1
    activations = ActivationSettings.read(config.get("activation_checkpoint"))
    apply_activations(model, activations, stages.modules, complete)
    refuse_marks(model, context)
    refuse_unfit(model)
    if device is None:
        return model, MetaStart(model, {}, context)
    warn_of_batch_norm(model, context)
    warn_of_repeated_work(model, context)
    # Parameters on the meta device get memory when they are sharded: for this rank's part alone.
    model = (
        model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device)) if recipes else model.to(device)
    )
    float8 = Float8Settings.read(config.get("float8"))
    if float8 is not None:
        convert_to_float8(model, float8, device)
    return model, MetaStart(model, recipes, context)


def read_losses(model: nn.Module, criterion: Any, schedule: BaseSchedule) -> tuple[Any, TrainingLoss | None]:
    """(criterion, the model's own loss): that one is taken where none is given, and is the criterion of a pipeline."""
    own = training_loss_of(model) if criterion is None else None
    if own is None or not isinstance(schedule, PipelineSchedule):
        return criterion, own
    own.require_pipeline()
    return own, own


# --- The optimizer and the handlers -------------------------------------------------------------------


def prepare_optimizer(
    optimizer: Any, model: nn.Module, context: ParallelContext, others: Sequence[nn.Module] = ()
) -> Any:
    """The optimizer of a model, built and checked; it may have parameters of `others`, the stages of the whole model."""
    built = optimizer if hasattr(optimizer, "param_groups") else optimizer(model.parameters())
    if not hasattr(built, "step") or not hasattr(built, "param_groups"):
        raise ConfigError(
            f"optimizer is a torch optimizer or a function of the parameters that returns one, not {type(built).__name__}"
        )
    if getattr(built, "is_sharded_elsewhere", False):
        raise GradientError(
            "the optimizer was sharded by an earlier initialize(), which has its state; build a new one, and give it "
            "load_state_dict(engine.optimizer.state_dict()) of that engine if it is to go on from there",
            code="C070",
        )
    refuse_optimizer(built, [model, *others], context)
    refuse_parts(built, model, context)
    return built


@dataclass(frozen=True)
class SumSettings:
    """What sums are planned from (`gradients.sum_plan.plan_sums`), beside the model and the layout."""

    optimizer: EngineOptimizer | None
    """The given one as an engine drives it, sharded at stages 1 and 2; None where none was given."""
    handlers: list[BuiltHandler]
    bucket_all: bool
    """Whether gradients that owe no sum lie in buckets too, as the flat step reads them there."""
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
    """The handlers of a config, the optimizer as it is stepped, and which gradients lie in buckets.

    Without an `optimizer`, as in an explanation, nothing is sharded and no step is flat. `planned_on`: the kind of device of a
    machine that is not here ("cpu", "cuda"). `failed`: as of `build_handlers`.
    """
    config = context.config
    driven: EngineOptimizer | None = None
    if zero.stage in (1, 2) and optimizer is not None:
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                f"zero stages 1 and 2 shard a torch optimizer, not {type(optimizer).__name__}; give one, or turn zero off",
                code="C070",
            )
        driven = ZeroOptimizer(optimizer, model, zero, config.get("flat_step"))
    elif optimizer is not None:
        driven = PlainOptimizer(optimizer, model, config.get("flat_step"))
    shards = driven.plan_shards(pipeline=context.pipeline_parallel_size > 1) if driven is not None else None

    # Handlers may look at the optimizer that steps: one with `sync_grad()` brings its own.
    named = list(config.get("gradient_handler") or config.get("gradient_handlers") or ())
    handlers = build_handlers(named, model, None if driven is None else driven.user_optimizer, context, failed)
    bucket_all = driven is not None and driven.needs_buckets(bool(config.get("graph_step")), planned_on)
    return SumSettings(driven, handlers, bucket_all, shards)

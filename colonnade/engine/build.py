"""initialize: from a model, an optimizer and a config to an engine. One small function per decision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from colonnade.comm.messages import agreed_errors
from colonnade.config import Config
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.checks.advice import warn_of_batch_norm, warn_of_repeated_work
from colonnade.engine.checks.same_stages import compare_stages
from colonnade.engine.checks.start_up import alike_optimizer, check_tied, numeric_settings
from colonnade.engine.checks.unfit import refuse_lazy, refuse_optimizer, refuse_parts
from colonnade.engine.compiling import compile_model
from colonnade.engine.engine import Engine
from colonnade.engine.gradient_handler.ledger import is_waived
from colonnade.engine.gradient_handler.sync import BuiltHandler, GradientSync, build_handlers, build_sync
from colonnade.engine.materialise import MetaStart, read_recipes, refuse_meta_state
from colonnade.engine.observers import announce
from colonnade.engine.precision import Float8, Precision
from colonnade.engine.schedule.base import BaseSchedule
from colonnade.engine.schedule.pipeline import PipelineSchedule
from colonnade.engine.skips import SkipAwareScheduler
from colonnade.engine.stepper import Stepper
from colonnade.errors import ConfigError, ContextError, GradientError, listed
from colonnade.hf.lora import check_adapters
from colonnade.hf.loss import ModelLoss, criterion_of
from colonnade.logging import get_dist_logger
from colonnade.nn.activations import ActivationSettings
from colonnade.optim.bucket_step import wants_flat
from colonnade.optim.clip_settings import ClipSettings
from colonnade.optim.scattered import can_scatter
from colonnade.optim.zero.fsdp import Sharding, shard_model
from colonnade.optim.zero.optimizer import ZeroOptimizer
from colonnade.optim.zero.settings import ZeroSettings
from colonnade.parallel.held import Placements, broadcast_shared, check_placements, refuse_marks
from colonnade.parallel.schedules import build_schedule
from colonnade.parallel.sources import check_ties
from colonnade.parallel.split import Split
from colonnade.parallel.stages import take_stages
from colonnade.reduce.options import SyncOptions

Initialized = tuple[Engine, Any, Any, Any]
"""(engine, train_dataloader, test_dataloader, lr_scheduler)"""


def initialize(
    model: nn.Module | Split | Callable[[], nn.Module | Split],
    optimizer: Any,
    criterion: Any = None,
    train_dataloader: Any = None,
    test_dataloader: Any = None,
    lr_scheduler: Any = None,
    verbose: bool = True,
    *,
    context: ParallelContext | None = None,
) -> Initialized:
    """Build the engine that the config of the launched context asks for. Collective over the world.

    `model` is a module, or what `colonnade.split` returned (this rank takes its stages of it), or a function without
    arguments that returns one; `optimizer` is an instance, or a function of the parameters. Without a `criterion` the
    model makes its loss itself. Weights that ranks share are made equal, handlers are attached, and everything that is
    wrong is said now, on every rank.
    """
    context = _launched(context)
    config, device, stages = context.config, context.device, context.pipeline_parallel_size
    with agreed_errors(device, parts=(1, stages, stages)) as agreement:
        _apply_backend_flags(config)
        refuse_meta_state(optimizer)
        precision, clip = Precision.read(config), ClipSettings.read(config.get("clip_grad_norm"))
        scaler, zero = precision.build_scaler(device), zero_settings(config, precision)
        schedule: BaseSchedule = build_schedule(context)
        built, start, was_split = _build_model(model, context, schedule)
        criterion, own_loss = _losses(built, criterion, schedule)
        precision.apply(built, device, zero.stage)
        compile_model(built, criterion, config.get("compile"), context)
        placements = Placements(built, context)
        agreement.require(numeric_settings(), placements.alike(), start.alike())
    placements.check(agreement.sizes[1])
    start.locate(sum(agreement.sizes[2]))
    unequal = broadcast_shared(built, context, compare=config.get("compare_weights") is not False)
    sharding = _shard_parameters(built, optimizer, context, zero)
    start.materialise(_home(zero, device))
    uncut = compare_stages(built, was_split, _num_stages(schedule, stages), context)
    with agreed_errors(device, parts=(stages,)) as agreement:
        for problem in (unequal, uncut):
            if problem is not None:
                raise problem
        plain = _build_optimizer(optimizer, built, list(model) if isinstance(model, Split) else [], context)
        agreement.require(alike_optimizer(plain, lr_scheduler, built, context.get_local_rank(ParallelMode.PIPELINE)))
        chosen = _shard_optimizer(plain, built, zero, config.get("flat_step"))
        handlers = build_handlers(_named_handlers(context), built, chosen, context)
    check_tied(plain, built, context)
    if sharding is not None:
        sharding.guard(plain)
    sync, flat = _synchronise(built, chosen, handlers, schedule, context)
    with agreed_errors(device):
        parts = built, chosen, precision.around(criterion, device)
        engine = Engine(
            *parts,
            context=context,
            sync=sync,
            stepper=Stepper(built, chosen, context, sync, clip, flat, scaler, bool(config.get("graph_step"))),
            precision=precision,
            own_loss=own_loss,
            schedule=schedule,
            accumulation=int(config.get("gradient_accumulation") or 1),
        )
    return _announced(engine), train_dataloader, test_dataloader, _scheduler(lr_scheduler, engine)


def _announced(engine: Engine) -> Engine:
    """Say what lies in which dtype, and what it takes; show it to whoever wants to see new engines."""
    get_dist_logger().info(str(engine.precision_table()))
    announce(engine)
    return engine


def zero_settings(config: Config, precision: Precision) -> ZeroSettings:
    """The `zero` section, with what others say of dtypes."""
    sync = {key: value for key, value in (config.get("sync") or {}).items() if key not in ("automatic", "waive")}
    options = SyncOptions.read(sync)
    return replace(
        ZeroSettings.read(config.get("zero")),
        master_weights=precision.master_weights,
        gather_dtype=precision.dtype,
        reduce_dtype=options.narrow or options.reduce_dtype,
    )


def _shard_parameters(
    model: nn.Module, optimizer: Any, context: ParallelContext, settings: ZeroSettings
) -> Sharding | None:
    """At stage 3: FSDP2 on the model, in place; an optimizer that was built before gets the new parameters."""
    if settings.stage != 3:
        return None
    sharding = shard_model(model, context, settings)
    if hasattr(optimizer, "param_groups"):
        sharding.carry_over(optimizer)
    check_placements(model, context)
    get_dist_logger().info(
        f"ZeRO stage 3: {sharding.units} modules are gathered one by one (FSDP2); whole on every rank: "
        f"{listed(sharding.whole)}"
    )
    _warn_of_waived(model, sharding, context)
    return sharding


def _warn_of_waived(model: nn.Module, sharding: Sharding, context: ParallelContext) -> None:
    """Say which parameters are summed though the config waives them: FSDP2 knows nothing of that."""
    waive = (context.config.get("sync") or {}).get("waive") or ()
    patterns = [waive] if isinstance(waive, str) else waive
    names = {name for name, _ in model.named_parameters()} - set(sharding.whole)
    waived = sorted(name for name in names if is_waived(name, patterns))
    if waived and context.layout.distinct_data > 1:
        get_dist_logger().warning(
            f"sync=dict(waive={waive!r}) has no effect on {listed(waived[:8])}{', ...' if len(waived) > 8 else ''}: "
            f"ZeRO stage 3 sums their gradients over the ranks that share them, and clips by the norm of the sum. For replicas that "
            f"differ on purpose use stage 0, 1 or 2",
            ranks=[0],
        )


def _home(settings: ZeroSettings, device: torch.device) -> torch.device:
    """Where parameters lie between steps."""
    return torch.device("cpu") if settings.stage == 3 and settings.offload else device


def _shard_optimizer(optimizer: Any, model: nn.Module, settings: ZeroSettings, flat: bool | None) -> Any:
    """The optimizer, sharded where the settings say stage 1 or 2."""
    if settings.stage not in (1, 2):
        return optimizer
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"zero stages 1 and 2 shard a torch optimizer, not {type(optimizer).__name__}; give one, or turn zero off",
            code="C070",
        )
    return ZeroOptimizer(optimizer, model, settings, flat)


def _synchronise(
    model: nn.Module, optimizer: Any, handlers: list[BuiltHandler], schedule: BaseSchedule, context: ParallelContext
) -> tuple[GradientSync, bool]:
    """The handlers with their buckets, and whether steps are flat. A sharded optimizer takes its buckets over."""
    if isinstance(schedule, PipelineSchedule):
        schedule.open_groups(context)
    config = context.config
    options = dict(config.get("sync") or {})
    if not hasattr(optimizer, "shards_of"):
        flat = wants_flat(list(model.parameters()), optimizer, config.get("flat_step"))
        # A graph of a step needs gradients that stay where they are; else the kernels find them anywhere.
        anywhere = all(can_scatter(parameter) for parameter in model.parameters() if parameter.requires_grad)
        flatten = flat and not (anywhere and not config.get("graph_step"))
        return build_sync(model, optimizer, context, handlers, options, bucket_all=flatten), flat
    shards = optimizer.shards_of(pipeline=context.pipeline_parallel_size > 1)
    sync = build_sync(model, optimizer, context, handlers, options, shards=shards)
    optimizer.attach(sync.synchroniser, model)
    optimizer.waits = context.waits
    sync.before_pass = optimizer.wait
    get_dist_logger().info(
        f"ZeRO stage {optimizer.settings.stage}: {optimizer.numel} of {sum(p.numel() for p in model.parameters())} "
        f"elements are stepped on here"
    )
    return sync, False


def _scheduler(lr_scheduler: Any, engine: Engine) -> Any:
    """The scheduler as it is, unless steps may be dropped (for another rank's sake too): those do not advance it."""
    drops = engine.may_skip or engine.context.world_size > 1
    return SkipAwareScheduler(lr_scheduler, engine) if lr_scheduler is not None and drops else lr_scheduler


def _launched(context: ParallelContext | None) -> ParallelContext:
    if context is None:
        from colonnade.core import global_context  # what a user who passes no context means

        context = global_context
    if not context.is_launched:
        raise ContextError("initialize() needs a launched context: call colonnade.launch(config) first", code="C013")
    context.waits.begin("in initialize()")
    return context


def _apply_backend_flags(config: Config) -> None:
    """Set what the config sets; else the user's own settings stay."""
    if config.get("cudnn_benchmark") is not None:
        torch.backends.cudnn.benchmark = config.cudnn_benchmark
    if config.get("cudnn_deterministic") is not None:
        torch.backends.cudnn.deterministic = config.cudnn_deterministic


def _num_stages(schedule: BaseSchedule, pipeline_ranks: int) -> int:
    """How many stages the model is to be cut into."""
    return len(schedule.stage_ranks(pipeline_ranks)) if isinstance(schedule, PipelineSchedule) else pipeline_ranks


def _build_model(model: Any, context: ParallelContext, schedule: BaseSchedule) -> tuple[nn.Module, MetaStart, bool]:
    """What this rank has of the model, how it starts, and whether `colonnade.split` made its stages."""
    built = model if isinstance(model, (nn.Module, Split)) else model()
    if not isinstance(built, (nn.Module, Split)):
        raise ConfigError(
            f"model is a torch.nn.Module, what colonnade.split returns, or a function that returns one of these, not "
            f"{type(built).__name__}"
        )
    whole = list(built) if isinstance(built, Split) else [built]
    refuse_lazy(whole)
    check_ties(whole)
    recipes = read_recipes(built, context)
    was_split = isinstance(built, Split)
    if isinstance(built, Split):
        built = _own_stages(built, context, schedule)
    complete = len(whole) > 1 or context.pipeline_parallel_size == 1
    ActivationSettings.read(context.config.get("activation_checkpoint")).apply(built, whole, complete)
    refuse_marks(built, context)
    check_adapters(built)
    warn_of_batch_norm(built, context)
    warn_of_repeated_work(built, context)
    device = context.device
    built = (
        built._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device)) if recipes else built.to(device)
    )
    float8 = Float8.read(context.config.get("float8"))
    if float8 is not None:
        float8.convert(built, device)
    return built, MetaStart(built, recipes, context), was_split


def _losses(model: nn.Module, criterion: Any, schedule: BaseSchedule) -> tuple[Any, ModelLoss | None]:
    """(criterion, the model's own loss): that one is taken where none is given, and is the criterion of a pipeline."""
    own = criterion_of(model) if criterion is None else None
    if own is None or not isinstance(schedule, PipelineSchedule):
        return criterion, own
    own.require_pipeline()
    return own, own


def _own_stages(split: Split, context: ParallelContext, schedule: BaseSchedule) -> nn.Module:
    if not isinstance(schedule, PipelineSchedule):
        raise ConfigError(
            f"the model is split into {len(split)} stages, but {type(schedule).__name__} runs no pipeline; choose one, as "
            f"in schedule=dict(type='OneFOneB', num_microbatches=8), or pass the whole model"
        )
    stage = context.get_local_rank(ParallelMode.PIPELINE)
    return take_stages(split, schedule.stage_ranks(context.pipeline_parallel_size), stage)


def _build_optimizer(optimizer: Any, model: nn.Module, stages: list[nn.Module], context: ParallelContext) -> Any:
    """That of the model; it may have parameters of other stages."""
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
    refuse_optimizer(built, [model, *stages], context)
    refuse_parts(built, model, context)
    return built


def _named_handlers(context: ParallelContext) -> list[Any]:
    config = context.config
    return list(config.get("gradient_handler") or config.get("gradient_handlers") or ())

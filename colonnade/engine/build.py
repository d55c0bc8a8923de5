"""initialize: from a model, an optimizer and a config to an engine.

What one rank can do alone stands in `engine.prepare`, which plans and explanations use too; here ranks compare what must be
alike, make their weights equal, and join their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from colonnade.comm.messages import Alike, agreed_errors, gather_json
from colonnade.config import Config
from colonnade.config.config import text_of
from colonnade.config.settings import (
    ClipSettings,
    ZeroSettings,
)
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.checks import compare_stages
from colonnade.engine.engine import Engine, announce
from colonnade.engine.gradient_sync import GradientSync, build_sync
from colonnade.engine.materialise import refuse_meta_state
from colonnade.engine.prepare import (
    SumSettings,
    prepare_model,
    prepare_optimizer,
    prepare_sums,
    read_losses,
    read_numerics,
    read_stages,
)
from colonnade.engine.schedule.base import BaseSchedule
from colonnade.engine.schedule.pipeline import PipelineSchedule
from colonnade.engine.stepper import SkipAwareScheduler, Stepper
from colonnade.errors import ContextError, GradientError, listed
from colonnade.gradients.ledger import is_waived
from colonnade.gradients.sum_plan import waived_patterns
from colonnade.logging import get_dist_logger
from colonnade.parallel.held import Placements, broadcast_shared, check_placements, held_tensors
from colonnade.parallel.split import Split, build_schedule
from colonnade.texts import format_bytes

if TYPE_CHECKING:
    from colonnade.optim.zero.fsdp import ShardedModel

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
    config, device, num_ranks = context.config, context.device, context.pipeline_parallel_size

    # This rank alone: its part of the model, in the dtypes of the config. What is wrong here is raised on all ranks, and what
    # follows from different code or settings on the ranks is compared before anything is sent.
    with agreed_errors(device, parts=(1, num_ranks, num_ranks)) as agreement:
        _apply_backend_flags(config)
        refuse_meta_state(optimizer)
        clip = ClipSettings.read(config.get("clip_grad_norm"))
        precision, zero = read_numerics(config)
        scaler = precision.build_scaler(device)
        schedule: BaseSchedule = build_schedule(context)
        stages = read_stages(model)
        built, start = prepare_model(stages, context, schedule, device)
        criterion, own_loss = read_losses(built, criterion, schedule)
        precision.apply(built, device, zero.stage)
        if config.get("compile"):
            from colonnade.engine.compile import compile_model

            compile_model(built, criterion, config.compile, context)
        placements = Placements(built, context)
        agreement.require(numeric_settings(), placements.alike(), start.alike())

    # Weights: what ranks share is made equal (from the meta device it is equal by itself), then sharded at stage 3. Parameters
    # get memory after that, so that a rank never has more of them than its shard.
    placements.check(agreement.sizes[1])
    start.locate(sum(agreement.sizes[2]))
    unequal = broadcast_shared(built, context, compare=config.get("compare_weights") is not False)
    sharding = _shard_parameters(built, optimizer, context, zero)
    start.materialise(_home(zero, device))
    uncut = compare_stages(built, stages.was_split, _num_stages(schedule, num_ranks), context)

    # The optimizer, when parameters are the tensors that it will step on; and the handlers, which may look at it.
    with agreed_errors(device, parts=(num_ranks,)) as agreement:
        for problem in (unequal, uncut):
            if problem is not None:
                raise problem
        plain = prepare_optimizer(optimizer, built, context, others=stages.modules if stages.was_split else ())
        agreement.require(alike_optimizer(plain, lr_scheduler, built, context.get_local_rank(ParallelMode.PIPELINE)))
        sums = prepare_sums(built, plain, context, zero)
        assert sums.optimizer is not None
    check_tied(plain, built, context)
    if sharding is not None:
        sharding.guard(plain)
    sync = _synchronise(built, sums, schedule, context)

    with agreed_errors(device):
        parts = built, sums.user_optimizer, precision.around(criterion, device)
        engine = Engine(
            *parts,
            context=context,
            sync=sync,
            stepper=Stepper(built, sums.optimizer, context, sync, clip, scaler, bool(config.get("graph_step"))),
            precision=precision,
            own_loss=own_loss,
            schedule=schedule,
            accumulation=int(config.get("gradient_accumulation") or 1),
        )
    # One line for a start; everything else that is known by now is for those who look for a mistake.
    table = engine.precision_table()
    axes = " x ".join(f"{axis.name} {axis.size}" for axis in context.layout.axes if axis.size > 1)
    get_dist_logger().info(
        f"{context.world_size} rank{'s' if context.world_size > 1 else ''}{f' ({axes})' if axes else ''} on {context.device.type}: "
        f"{table.parameters:,} parameters on this rank, {format_bytes(table.parameters * table.bytes_per_parameter)} for weights, "
        f"gradients and optimizer state"
    )
    get_dist_logger().debug(str(table))
    announce(engine)
    return engine, train_dataloader, test_dataloader, _scheduler(lr_scheduler, engine)


def _shard_parameters(
    model: nn.Module, optimizer: Any, context: ParallelContext, settings: ZeroSettings
) -> ShardedModel | None:
    """At stage 3: FSDP2 on the model, in place; an optimizer that was built before gets the new parameters."""
    if settings.stage != 3:
        return None
    from colonnade.optim.zero.fsdp import shard_model

    sharding = shard_model(model, context, settings)
    if hasattr(optimizer, "param_groups"):
        sharding.carry_over(optimizer)
    check_placements(model, context)
    get_dist_logger().debug(
        f"ZeRO stage 3: {sharding.units} modules are gathered one by one (FSDP2); whole on every rank: "
        f"{listed(sharding.whole)}"
    )
    _warn_of_waived(model, sharding, context)
    return sharding


def _warn_of_waived(model: nn.Module, sharding: ShardedModel, context: ParallelContext) -> None:
    """Say which parameters are summed though the config waives them: FSDP2 knows nothing of that."""
    options = context.config.get("sync") or {}
    waive, patterns = options.get("waive") or (), waived_patterns(options)
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


def _synchronise(model: nn.Module, sums: SumSettings, schedule: BaseSchedule, context: ParallelContext) -> GradientSync:
    """The handlers with their buckets. A sharded optimizer takes its buckets over."""
    if isinstance(schedule, PipelineSchedule):
        schedule.open_groups(context)
    optimizer, options = sums.optimizer, dict(context.config.get("sync") or {})
    assert optimizer is not None
    sync = build_sync(
        model, sums.user_optimizer, context, sums.handlers, options, sums.bucket_all, sums.shards, optimizer.wait
    )
    optimizer.attach(sync.synchroniser, context.waits)
    return sync


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


# --- What ranks compare: settings of torch that change numbers, and the optimizer -----------------


def numeric_settings() -> Alike:
    """The settings of torch that decide how numbers are computed."""
    backends: Any = torch.backends
    settings = {
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.backends.cuda.matmul.fp32_precision": backends.cuda.matmul.fp32_precision,
        "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": (
            backends.cuda.matmul.allow_fp16_reduced_precision_reduction
        ),
        "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": (
            backends.cuda.matmul.allow_bf16_reduced_precision_reduction
        ),
        "torch.backends.cudnn.conv.fp32_precision": backends.cudnn.conv.fp32_precision,
        "torch.backends.mkldnn.matmul.fp32_precision": backends.mkldnn.matmul.fp32_precision,
    }
    return Alike(
        "the setting",
        {name: str(value) for name, value in settings.items()},
        "It decides how numbers are rounded, so replicas would drift apart: set it alike on every rank. (allow_tf32 and "
        "torch.set_float32_matmul_precision set these too.)",
    )


def alike_optimizer(optimizer: Any, lr_scheduler: Any, model: nn.Module, stage: int) -> Alike:
    """Class, groups and options of the optimizer and the settings of the scheduler, for all ranks of a stage."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    items = {"class": _class(optimizer)}
    for at, group in enumerate(optimizer.param_groups):
        items |= {f"group {at}: {key}": _value(value) for key, value in group.items() if key != "params"}
        for number, parameter in enumerate(group["params"]):
            items[names.get(id(parameter), f"group {at}: parameter {number}")] = f"in group {at}"
    if lr_scheduler is not None:
        state = lr_scheduler.state_dict() if hasattr(lr_scheduler, "state_dict") else {}
        items["lr_scheduler"] = _class(lr_scheduler)
        if isinstance(state, Mapping):
            items |= {f"lr_scheduler: {key}": _value(value) for key, value in state.items()}
    return Alike(
        "the optimizer's",
        items,
        "Ranks that hold the same parameters must step on them alike, or they drift apart: build the same optimizer, groups "
        "and scheduler on every rank of a pipeline stage.",
        GradientError,
        part=stage,
    )


def check_tied(optimizer: Any, model: nn.Module, context: ParallelContext) -> None:
    """Refuse a weight that stages share and that they would step on differently. Collective along the pipeline."""
    if context.pipeline_parallel_size == 1:
        return
    keys = {id(held.tensor): held.placement.tied.key for held in held_tensors(model, context) if held.placement.tied}
    mine: dict[str, dict[str, str]] = {}
    for group in optimizer.param_groups:
        options = {key: _value(value) for key, value in group.items() if key != "params"}
        mine |= {keys[id(parameter)]: options for parameter in group["params"] if id(parameter) in keys}
    # All ranks of a stage say the same, so every pipeline comes to the same end.
    everyone = gather_json(mine, context.device, context.get_group(ParallelMode.PIPELINE))
    for key in sorted({key for said in everyone for key in said}):
        (first, usual), *others = [(stage, said[key]) for stage, said in enumerate(everyone) if key in said]
        for stage, options in others:
            differing = next((name for name in {**options, **usual} if options.get(name) != usual.get(name)), None)
            if differing is not None:
                raise GradientError(
                    f"the stages do not agree on the optimizer's {differing!r} for the tied weight {key!r}: "
                    f"{usual.get(differing)} at stage {first}, {options.get(differing)} at stage {stage}. They hold the same weight, "
                    f"so they must step on it alike."
                )


def _class(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _value(value: Any) -> str:
    return text_of(value.tolist() if isinstance(value, Tensor) else value)

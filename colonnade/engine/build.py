"""`initialize`: builds an engine from a model, an optimizer and a config.

The steps that need no other rank are in `engine.prepare`, shared with `colonnade plan` and `colonnade explain`. The steps of this
file need all ranks: they compare the settings that must agree, make weights equal, and set up the gradient reductions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from colonnade.comm.messages import MustMatch, agreed_errors, gather_json
from colonnade.config.config import text_of
from colonnade.config.settings import ClipSettings, SyncSettings, ZeroSettings
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.checks import compare_stages
from colonnade.engine.engine import Engine, announce
from colonnade.engine.gradient_sync import build_sync
from colonnade.engine.prepare import (
    prepare_model,
    prepare_optimizer,
    prepare_sums,
    read_losses,
    read_numerics,
    read_stages,
)
from colonnade.engine.schedule.schedules import BaseSchedule, PipelineSchedule
from colonnade.engine.stepper import SkipAwareScheduler, Stepper
from colonnade.errors import ContextError, GradientError, listed
from colonnade.gradients.ledger import is_waived
from colonnade.logging import get_dist_logger
from colonnade.parallel.held import Placements, broadcast_shared, check_placements, held_tensors
from colonnade.parallel.meta import refuse_meta_state
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
    """Build the engine for the config of the launched context. Collective over the world.

    Weights of replicas are made equal and gradient handlers are attached. Every inconsistency is raised here, on all ranks.

    Args:
        model: a module; or the result of `colonnade.split`, of which this rank takes its stages; or a function without
            arguments that returns one of these.
        optimizer: a torch optimizer, or a function of the parameters that returns one.
        criterion: the loss; by default the model's own, as of Hugging Face models.
        train_dataloader: returned unchanged.
        test_dataloader: returned unchanged.
        lr_scheduler: a learning-rate scheduler. If steps may be skipped, it is wrapped so that skipped steps do not advance it.
        verbose: ignored; accepted for Colossal-AI scripts.
        context: the launched context; by default the global one.

    Returns:
        (engine, train_dataloader, test_dataloader, lr_scheduler).

    Raises:
        ContextError: `colonnade.launch` was not called.
        ConfigError: a setting does not fit the model, the optimizer or the device.
        PlacementError: the placements of the parameters differ between ranks.
        GradientError: a gradient reduction is missing, duplicated or has the wrong divisor, or ranks would step differently.

    Example::

        gpc = colonnade.launch(dict(clip_grad_norm=1.0))
        model = nn.Linear(4, 2)
        engine, *_ = colonnade.initialize(model, torch.optim.AdamW(model.parameters()), nn.MSELoss())
        engine.zero_grad()
        engine.backward(engine.criterion(engine(torch.ones(8, 4)), torch.ones(8, 2)))
        engine.step()
    """
    if context is None:
        from colonnade.core import global_context  # a user who passes no context means this one

        context = global_context
    if not context.is_launched:
        raise ContextError("initialize() needs a launched context: call colonnade.launch(config) first", code="C013")
    context.waits.begin("in initialize()")
    config, device, num_ranks = context.config, context.device, context.pipeline_parallel_size

    # This rank only: its stages of the model, in the dtypes of the config. An error of one rank is raised on all of them.
    # Facts that follow from the code or the settings of each rank are compared before any tensor is sent: different shapes or
    # dtypes would hang or corrupt the first collective.
    with agreed_errors(device, parts=(1, num_ranks, num_ranks)) as agreement:
        # Keys that are not in the config leave the user's own settings of torch alone.
        if config.get("cudnn_benchmark") is not None:
            torch.backends.cudnn.benchmark = config.cudnn_benchmark
        if config.get("cudnn_deterministic") is not None:
            torch.backends.cudnn.deterministic = config.cudnn_deterministic
        refuse_meta_state(optimizer)
        clip = ClipSettings.read(config.get("clip_grad_norm"))
        precision, zero = read_numerics(config)
        scaler = precision.build_scaler(device)
        schedule: BaseSchedule = build_schedule(context)
        stages = read_stages(model)
        built, start = prepare_model(stages, context, schedule, device)
        if config.get("cuda_graph") is True:
            from colonnade.engine.schedule.graphed import graphed

            handlers = config.get("gradient_handler") or config.get("gradient_handlers") or ()
            schedule = graphed(schedule, handlers, device, context.world_size)
        criterion, own_loss = read_losses(built, criterion, schedule)
        precision.apply(built, device, zero.stage)
        if config.get("compile"):
            from colonnade.engine.compile import compile_model

            compile_model(built, criterion, config.compile, context)
        placements = Placements(built, context)
        agreement.require(numeric_settings(), placements.alike(), start.alike())

    # Weights. Replicas are made equal by a broadcast, then sharded at stage 3. Parameters on the meta device get memory only
    # afterwards, so that a rank never allocates more than its shards; they start equal because all ranks initialise them alike.
    placements.check(agreement.sizes[1])
    start.locate(sum(agreement.sizes[2]))
    unequal = broadcast_shared(built, context, compare=config.get("compare_weights") is not False)
    sharding = _shard_parameters(built, optimizer, context, zero)
    start.materialise(_home(zero, device))
    num_stages = len(schedule.stage_ranks(num_ranks)) if isinstance(schedule, PipelineSchedule) else num_ranks
    same_stages = compare_stages(built, stages.was_split, num_stages, context)

    # The optimizer, now that the parameters are the tensors it will step on; then the handlers, which may look at it.
    with agreed_errors(device, parts=(num_ranks,)) as agreement:
        for problem in (unequal, same_stages):
            if problem is not None:
                raise problem
        plain = prepare_optimizer(optimizer, built, context, others=stages.modules if stages.was_split else ())
        agreement.require(alike_optimizer(plain, lr_scheduler, built, context.get_local_rank(ParallelMode.PIPELINE)))
        sums = prepare_sums(built, plain, context, zero)
        assert sums.optimizer is not None
    check_tied(plain, built, context)
    if sharding is not None:
        sharding.guard(plain)

    # Reductions: the ledger is checked and buckets are laid out. A sharded optimizer steps on its slices of the buckets.
    if isinstance(schedule, PipelineSchedule):
        schedule.open_groups(context)
    sync = build_sync(
        built,
        sums.user_optimizer,
        context,
        sums.handlers,
        bucket_all=sums.bucket_all,
        shards=sums.shards,
        before_pass=sums.optimizer.wait,
    )
    sums.optimizer.attach(sync.synchroniser, context.waits)

    with agreed_errors(device):
        engine = Engine(
            built,
            sums.user_optimizer,
            precision.around(criterion, device),
            context=context,
            sync=sync,
            stepper=Stepper(built, sums.optimizer, context, sync, clip, scaler, bool(config.get("cuda_graph"))),
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
    """At ZeRO stage 3, apply FSDP2 to the model in place; an optimizer built before gets the new parameters."""
    if settings.stage != 3:
        return None
    from colonnade.optim.zero.fsdp import shard_model

    sharding = shard_model(model, context, settings)
    if hasattr(optimizer, "param_groups"):
        sharding.carry_over(optimizer)
    check_placements(model, context)
    get_dist_logger().debug(
        f"ZeRO stage 3: {sharding.units} modules are gathered one by one (FSDP2); not sharded: {listed(sharding.whole)}"
    )

    # FSDP2 reduces every gradient itself, so `sync.waive` cannot apply to its parameters.
    waive = SyncSettings.read(context.config.get("sync")).waive
    names = {name for name, _ in model.named_parameters()} - set(sharding.whole)
    waived = sorted(name for name in names if is_waived(name, waive))
    if waived and context.layout.distinct_data > 1:
        get_dist_logger().warning(
            f"sync=dict(waive={list(waive)}) has no effect on "
            f"{listed(waived[:8])}{', ...' if len(waived) > 8 else ''}. ZeRO stage 3 reduces the gradients of these "
            "parameters over the ranks that shard them, and clips by the norm of the sum. If replicas must differ, "
            "use stage 0, 1 or 2.",
            ranks=[0],
        )
    return sharding


def _home(settings: ZeroSettings, device: torch.device) -> torch.device:
    """The device of parameters between steps."""
    return torch.device("cpu") if settings.stage == 3 and settings.offload else device


def _scheduler(lr_scheduler: Any, engine: Engine) -> Any:
    """The scheduler; wrapped if steps may be skipped, because of this rank's gradient or a failure of another rank."""
    skips = engine.may_skip or engine.context.world_size > 1
    return SkipAwareScheduler(lr_scheduler, engine) if lr_scheduler is not None and skips else lr_scheduler


# --- Comparisons between ranks: numeric settings of torch, and the optimizer ----------------------


def numeric_settings() -> MustMatch:
    """A table to compare between ranks: the torch settings that change the rounding of numbers."""
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
    return MustMatch(
        "the setting",
        {name: str(value) for name, value in settings.items()},
        "This setting changes how numbers are rounded, so replicas would drift apart: use the same value on every "
        "rank. (allow_tf32 and "
        "torch.set_float32_matmul_precision change these settings too.)",
    )


def alike_optimizer(optimizer: Any, lr_scheduler: Any, model: nn.Module, stage: int) -> MustMatch:
    """A table to compare between the ranks of a pipeline stage: the optimizer (class, groups, options) and the scheduler
    (settings).
    """
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
    return MustMatch(
        "the optimizer's",
        items,
        "Ranks that store the same parameters must make the same steps, or replicas drift apart: build the same optimizer, "
        "groups and scheduler on every rank of a pipeline stage.",
        GradientError,
        part=stage,
    )


def check_tied(optimizer: Any, model: nn.Module, context: ParallelContext) -> None:
    """Raise if the optimizers of different stages would update a tied weight differently. Collective along the pipeline."""
    if context.pipeline_parallel_size == 1:
        return
    keys = {id(held.tensor): held.placement.tied.key for held in held_tensors(model, context) if held.placement.tied}
    local: dict[str, dict[str, str]] = {}
    for group in optimizer.param_groups:
        options = {key: _value(value) for key, value in group.items() if key != "params"}
        local |= {keys[id(parameter)]: options for parameter in group["params"] if id(parameter) in keys}
    # Ranks of a stage are known to have the same options, so all pipelines raise or none.
    by_stage = gather_json(local, context.device, context.get_group(ParallelMode.PIPELINE))
    for key in sorted({key for tied in by_stage for key in tied}):
        (first, expected), *others = [(stage, tied[key]) for stage, tied in enumerate(by_stage) if key in tied]
        for stage, options in others:
            names = {**options, **expected}
            differing = next((name for name in names if options.get(name) != expected.get(name)), None)
            if differing is not None:
                raise GradientError(
                    f"the optimizer's {differing!r} for the tied weight {key!r} is {expected.get(differing)} at "
                    f"stage {first} and {options.get(differing)} at stage {stage}. Both stages store this weight. "
                    "Use the same optimizer options for it at both stages."
                )


def _class(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _value(value: Any) -> str:
    return text_of(value.tolist() if isinstance(value, Tensor) else value)

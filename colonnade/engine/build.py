"""initialize: from a model, an optimizer and a config to an engine. One small function per decision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from colonnade.comm import torch_versions
from colonnade.comm.messages import Alike, agreed_errors, gather_json
from colonnade.comm.torch_versions import dtensor_like, exchange_tensors, refresh_shards
from colonnade.config import Config
from colonnade.config.config import text_of
from colonnade.config.settings import (
    ActivationSettings,
    ClipSettings,
    CompileSettings,
    Float8Settings,
    SyncSettings,
    ZeroSettings,
)
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.checks import (
    compare_stages,
    refuse_lazy,
    refuse_optimizer,
    refuse_parts,
    warn_of_batch_norm,
    warn_of_repeated_work,
)
from colonnade.engine.engine import Engine, announce
from colonnade.engine.gradient_sync import BuiltHandler, GradientSync, build_handlers, build_sync
from colonnade.engine.precision import Precision, convert_to_float8
from colonnade.engine.schedule.base import BaseSchedule
from colonnade.engine.schedule.pipeline import PipelineSchedule
from colonnade.engine.stepper import SkipAwareScheduler, Stepper
from colonnade.errors import ConfigError, ContextError, GradientError, PlacementError, listed
from colonnade.gradients.ledger import is_waived
from colonnade.hf.lora import check_adapters
from colonnade.hf.model_loss import ModelLoss, criterion_of
from colonnade.logging import get_dist_logger
from colonnade.nn.activations import apply_activations
from colonnade.nn.layer.cross_entropy import CrossEntropyLoss
from colonnade.optim.bucket_step import can_scatter, wants_flat
from colonnade.optim.zero.fsdp import ShardedModel, outer_members, shard_model
from colonnade.optim.zero.zero_optimizer import ZeroOptimizer
from colonnade.parallel.boxes import Box, moved
from colonnade.parallel.dtensor import check_ties, local_part
from colonnade.parallel.held import Placements, broadcast_shared, check_placements, held_tensors, refuse_marks
from colonnade.parallel.meta import ParameterInit, ParameterLoad, forget_initial_value, parameter_inits
from colonnade.parallel.placement import is_dtensor
from colonnade.parallel.split import Split, Stage, build_schedule, take_stages
from colonnade.parallel.whole import LocalTensor, locate_tensors, offset_in_dtensor

# --------------------------------------------------------------------------------------------------
# A model that was built inside meta_init(): the recipes of its parameters, and this rank's part of each made from them.
# --------------------------------------------------------------------------------------------------


Recipes = dict[int, ParameterInit | ParameterLoad]


def read_recipes(model: nn.Module | Split, context: ParallelContext) -> Recipes:
    """How the parameters on the meta device start, by id. Names are those of the whole model, where it is given whole."""
    if isinstance(model, Split):
        return parameter_inits(model)
    stage = context.get_local_rank(ParallelMode.PIPELINE)
    return parameter_inits([model], f"stage {stage}: " if context.pipeline_parallel_size > 1 else "")


def refuse_meta_state(optimizer: Any) -> None:
    """Refuse an optimizer that keeps state of parameters without memory: its values are lost, and cannot be made here."""
    for kept in getattr(optimizer, "state", {}).values():
        for key, value in kept.items() if isinstance(kept, Mapping) else ():
            if isinstance(value, Tensor) and value.is_meta:
                name = type(optimizer).__name__
                raise GradientError(
                    f"{name} has state ({key}) of parameters that were built inside meta_init() and have no memory yet, so its values are "
                    f"lost: some optimizers make state when they are built, and load_state_dict() gives it to all. Give initialize() a "
                    f"function, lambda parameters: {name}(parameters, ...), and load state after it, by CheckpointManager or "
                    f"engine.optimizer.load_state_dict()",
                    code="C034",
                )


class MetaStart:
    """The parameters of a built model that have no memory yet, and where this rank's part lies in the whole of each."""

    def __init__(self, model: nn.Module, recipes: Recipes, context: ParallelContext) -> None:
        self._model, self._context = model, context
        self._recipes = {name: recipes[id(p)] for name, p in model.named_parameters() if id(p) in recipes}
        self._places: dict[str, LocalTensor] = {}
        self._everywhere = 0

    def alike(self) -> Alike:
        """What all ranks of a pipeline stage must have in common: nothing else makes their parameters equal."""
        return Alike(
            "the start of",
            {name: str(recipe) for name, recipe in self._recipes.items()},
            "Inside meta_init() every rank of a pipeline stage builds the same model, and initialises it in the same way.",
            PlacementError,
            part=self._context.get_local_rank(ParallelMode.PIPELINE),
        )

    def locate(self, everywhere: int) -> None:
        """Before parameters are sharded: where they lie in their wholes. Collective, if there are any in the world."""
        self._everywhere = everywhere
        if not everywhere:
            return
        located = locate_tensors(self._model, self._context, "starting from the meta device", own_names=True)
        self._places = {name: tensor for tensor in located for name in tensor.names}

    def materialise(self, device: torch.device) -> None:
        """Give every parameter memory on `device` for what this rank holds of it, and its values. Collective, as `locate`."""
        if not self._everywhere:
            return
        with agreed_errors(self._context.device):
            for name, parameter in self._model.named_parameters():
                if name in self._recipes:
                    _materialise(parameter, self._places[name], self._recipes[name], device, self._context.seed)
            for module in self._model.modules():
                if hasattr(module, "_get_fsdp_state"):
                    refresh_shards(module)


def _materialise(
    parameter: Any, place: LocalTensor, recipe: ParameterInit | ParameterLoad, device: torch.device, seed: int
) -> None:
    part = local_part(parameter)
    local = torch.empty_strided(part.size(), part.stride(), dtype=part.dtype, device=device)
    first = offset_in_dtensor(parameter) if is_dtensor(parameter) else [0] * local.dim()
    mine = Box(tuple(first), tuple(local.shape))
    # A model that was cut after meta_init() starts from whole parameters, else from the parts that it was built of.
    from_whole = tuple(recipe.tensor.shape) == place.shape
    for box, here in place.places:
        shared = mine.shared_with(here)
        if shared is not None:
            inside = moved(shared, here, box)
            start = inside.offset if from_whole else shared.offset
            recipe.fill(local[shared.slices_in(mine)], start, place.shape, inside.offset, seed)
    real: Tensor = local
    if is_dtensor(parameter):
        real = dtensor_like(parameter, local)
    _become(parameter, nn.Parameter(real, parameter.requires_grad))


def _become(parameter: Any, real: Any) -> None:
    """Make `parameter` what `real` is. It stays the same object, with its attributes and hooks: others may know it."""
    forget_initial_value(parameter)
    hooks = list((parameter._backward_hooks or {}).values())
    later = list((parameter._post_accumulate_grad_hooks or {}).values())
    exchange_tensors(parameter, real)
    parameter._backward_hooks = parameter._post_accumulate_grad_hooks = None
    for hook in hooks:
        parameter.register_hook(hook)
    for hook in later:
        parameter.register_post_accumulate_grad_hook(hook)


# --------------------------------------------------------------------------------------------------
# What ranks compare when an engine is built: settings of torch that change numbers, and the optimizer.
# --------------------------------------------------------------------------------------------------


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


# --------------------------------------------------------------------------------------------------
# torch.compile by config: a model's blocks one by one, so that all of a kind are compiled once, or the model as one.
# --------------------------------------------------------------------------------------------------


_INSIDE = (ParallelMode.TENSOR, ParallelMode.SEQUENCE, ParallelMode.EXPERT)
"""Modes whose collectives are in the forward pass."""


def compile_model(model: nn.Module, criterion: Any, options: Any, context: ParallelContext) -> None:
    """torch.compile in place, so that parameter names stay; `options` are the config's.

    `blocks=False` compiles the model (each chunk of a pipeline stage) in one piece, as is done where it has no blocks.
    Of the criterion only our own cross-entropy is compiled, as what the engine reads off a loss would be lost.
    """
    settings = CompileSettings.read(options)
    if settings is None:
        return
    _refuse_lost_sums(context)
    losses = criterion.modules() if isinstance(criterion, nn.Module) else ()
    chosen: list[nn.Module] = []
    chosen += (loss for loss in losses if type(loss) is CrossEntropyLoss and loss.reduction != "mean")
    for chunk in model if isinstance(model, nn.ModuleList) else [model]:
        chosen += blocks_of(chunk) if settings.blocks else [chunk]
    for module in chosen:
        try:
            module.compile(**settings.options)
        except Exception as error:  # torch says in many ways that it cannot
            raise ConfigError(f"compile: torch.compile cannot be called with {settings.options}: {error}") from error


def _refuse_lost_sums(context: ParallelContext) -> None:
    split = [mode for mode in _INSIDE if context.is_initialized(mode) and context.get_world_size(mode) > 1]
    if split and not torch_versions.COMPILES_COLLECTIVES:
        raise ConfigError(
            f"compile: torch {torch.__version__} leaves sums over {split[0]} out of the backward pass, and gradients would be "
            f"wrong; use torch 2.13 or later, or leave compile out of the config",
            code="C023",
        )


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model and what stands in a row with them; the model itself where no two blocks are alike."""
    found = list(_layers(model))
    kinds = Counter(type(module) for module in found if any(True for _ in module.children()))
    is_stage = isinstance(model, Stage)
    return found if is_stage or any(count > 1 for count in kinds.values()) else [model]


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    if isinstance(model, Stage):
        yield from (model.get_submodule(name) for name in model.layer_names)
    else:
        yield from outer_members(model)


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
    sync = SyncSettings.read(config.get("sync"))
    return replace(
        ZeroSettings.read(config.get("zero")),
        master_weights=precision.master_weights,
        gather_dtype=precision.dtype,
        reduce_dtype=sync.narrow or sync.reduce_dtype,
    )


def _shard_parameters(
    model: nn.Module, optimizer: Any, context: ParallelContext, settings: ZeroSettings
) -> ShardedModel | None:
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


def _warn_of_waived(model: nn.Module, sharding: ShardedModel, context: ParallelContext) -> None:
    """Say which parameters are summed though the config waives them: FSDP2 knows nothing of that."""
    waive = SyncSettings.read(context.config.get("sync")).waive
    names = {name for name, _ in model.named_parameters()} - set(sharding.whole)
    waived = sorted(name for name in names if is_waived(name, waive))
    if waived and context.layout.distinct_data > 1:
        get_dist_logger().warning(
            f"sync=dict(waive={(context.config.get('sync') or {}).get('waive')!r}) has no effect on {listed(waived[:8])}{', ...' if len(waived) > 8 else ''}: "
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
    activations = ActivationSettings.read(context.config.get("activation_checkpoint"))
    apply_activations(built, activations, whole, complete)
    refuse_marks(built, context)
    check_adapters(built)
    warn_of_batch_norm(built, context)
    warn_of_repeated_work(built, context)
    device = context.device
    built = (
        built._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device)) if recipes else built.to(device)
    )
    float8 = Float8Settings.read(context.config.get("float8"))
    if float8 is not None:
        convert_to_float8(built, float8, device)
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

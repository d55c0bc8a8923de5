"""What ranks compare when an engine is built: settings of torch that change numbers, and the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.comm.messages import Alike, gather_json
from colonnade.config.compared import text_of
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import GradientError
from colonnade.parallel.held import held_tensors


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

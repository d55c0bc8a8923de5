"""How a stage is called, and the message where it cannot take what the stage before it gave."""

from __future__ import annotations

import inspect
import re
from typing import Any

from torch import Tensor, nn

from colonnade.engine.schedule.executor.micro_batch import MicroBatch
from colonnade.errors import ScheduleError
from colonnade.parallel.split import Stage, call_layer

_ABOUT_FORM = re.compile(r"shape|size|dtype|must match|expected|dimension", re.IGNORECASE)


def call_module(stage: int, module: nn.Module, inputs: Any, micro_batch: MicroBatch) -> Any:
    """The usual forward hook: a dict goes in by keyword, a tuple or list by position, anything else alone.

    A stage cut out of an nn.Sequential takes what the layer before it returned as one argument, as it did there.
    """
    one_value = stage > 0 and isinstance(module, Stage) and module.takes_one_value
    try:
        return call_layer(module, inputs, one_value)
    except (TypeError, RuntimeError) as error:
        if stage > 0 and (reason := stage_mismatch(module, inputs, one_value, error)):
            raise ScheduleError(
                f"stage {stage} cannot take what stage {stage - 1} gives: {reason}\n"
                f"  stage {stage - 1} gives: {format_value(inputs)}\n"
                f"  stage {stage} takes: {format_signature(module)}",
                code="C053",
            ) from error
        raise


def stage_mismatch(module: nn.Module, inputs: Any, one_value: bool, error: Exception) -> str | None:
    """The reason why a stage cannot take these inputs, if that is what the error is about."""
    if isinstance(error, TypeError):
        bind = inspect.signature(_first_layer(module).forward).bind
        try:
            call_layer(bind, inputs, one_value)
        except TypeError as mismatch:
            return str(mismatch)
        return None
    return str(error) if type(error) is RuntimeError and _ABOUT_FORM.search(str(error)) else None


def format_value(value: Any) -> str:
    """A nested value in one line: tensors as dtype and shape."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {format_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        inside = ", ".join(map(format_value, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    return repr(value)


def format_signature(module: nn.Module) -> str:
    """How the first layer of a stage is called."""
    first = _first_layer(module)
    weights = ", ".join(f"{name} {list(parameter.shape)}" for name, parameter in first.named_parameters(recurse=False))
    return f"{type(first).__name__}.forward{inspect.signature(first.forward)}" + (f" with {weights}" if weights else "")


def _first_layer(module: nn.Module) -> nn.Module:
    return module.get_submodule(next(iter(module.layer_names))) if isinstance(module, Stage) else module

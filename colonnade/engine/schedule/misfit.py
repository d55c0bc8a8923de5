"""Whether an error of a stage comes from what the stage before it gave, and both sides in words."""

from __future__ import annotations

import inspect
import re
from typing import Any

from torch import Tensor, nn

from colonnade.parallel.split import Stage

_OF_A_FORM = re.compile(r"shape|size|dtype|must match|expected|dimension", re.IGNORECASE)


def misfit(module: nn.Module, inputs: Any, alone: bool, error: Exception) -> str | None:
    """The reason why a stage cannot take these inputs, if that is what the error is about."""
    args: list[Any] = [inputs] if alone or not isinstance(inputs, (dict, list, tuple)) else []
    args = args or (list(inputs) if not isinstance(inputs, dict) else [])
    kwargs = inputs if isinstance(inputs, dict) and not alone else {}
    if isinstance(error, TypeError):
        try:
            inspect.signature(_first(module).forward).bind(*args, **kwargs)
        except TypeError as mismatch:
            return str(mismatch)
        return None
    return str(error) if type(error) is RuntimeError and _OF_A_FORM.search(str(error)) else None


def shown(value: Any) -> str:
    """A nested value in one line: tensors as dtype and shape."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {shown(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        inside = ", ".join(map(shown, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    return repr(value)


def takes(module: nn.Module) -> str:
    """How the first layer of a stage is called."""
    first = _first(module)
    weights = ", ".join(f"{name} {list(parameter.shape)}" for name, parameter in first.named_parameters(recurse=False))
    return f"{type(first).__name__}.forward{inspect.signature(first.forward)}" + (f" with {weights}" if weights else "")


def _first(module: nn.Module) -> nn.Module:
    return module.get_submodule(module.layer_names[0]) if isinstance(module, Stage) else module

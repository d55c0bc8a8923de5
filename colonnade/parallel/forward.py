"""Give one module another forward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn


def override_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Let `forward(module, before, *args, **kwargs)` run for the module; `before(module, ...)` is its forward pass so far.

    By a class of its own, not by a method on the instance: that would belong to this module in a copy of it too, and be
    a cycle that keeps the weights in memory until Python looks for cycles.
    """
    kind: Any = type(module)
    before = _own_forward(module, vars(module).pop("forward", None))

    @functools.wraps(kind.forward)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, before, *args, **kwargs)

    module.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, "forward": run})


def _own_forward(module: nn.Module, given: Any) -> Callable[..., Any]:
    """As a function of the module: that of its class, or what someone has put on the instance."""
    if given is None:
        return type(module).forward
    if getattr(given, "__self__", None) is module:
        return given.__func__
    return lambda self, *args, **kwargs: given(*args, **kwargs)

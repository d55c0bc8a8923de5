"""Calls of units, caught: while a forward pass is recorded, and while a stage runs its part of it."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol

from torch import nn


class Watcher(Protocol):
    """Decides what a call of a unit does."""

    def call(self, name: str, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of calling the unit `name`; `own` calls it."""


WATCHER: ContextVar[Watcher | None] = ContextVar("watcher", default=None)
"""Who watches the calls of this thread; nobody while a block computes its activations again."""


def catch_calls(name: str, unit: nn.Module) -> None:
    """Have calls of the unit go through the watcher, where there is one. Its class changes; else nothing does."""
    vars(unit)["_colonnade_unit"] = name
    if not isinstance(unit, _Caught):
        unit.__class__ = derived(_Caught, type(unit))


class _Caught:
    """By __call__ and not by a hook: a layer of transformers that computes its activations again runs its hooks again."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        watcher, own = WATCHER.get(), super().__call__  # type: ignore[misc]
        return (
            own(*args, **kwargs) if watcher is None else watcher.call(vars(self)["_colonnade_unit"], own, args, kwargs)
        )


_derived: dict[Any, Any] = {}


def derived(base: type, kind: type) -> Any:
    """A class of the same name as `kind` that inherits `base` first; the same one each time."""
    if (base, kind) not in _derived:
        _derived[base, kind] = type(kind.__name__, (base, kind), {"__module__": kind.__module__})
    return _derived[base, kind]

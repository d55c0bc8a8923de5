"""Replacing the forward pass of a single module: the module gets a new class that inherits from its previous class.

A forward method set as an attribute of the instance would have two defects: in a copy of the module it would still be bound to
the original, and it would form a reference cycle, which keeps the weights in memory until the garbage collector runs.
`override_forward` replaces a forward pass, and `restore_forward` restores it. `subclass_with` makes a class that changes more
than forward(): watched calls, lists with absent members.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

_OVERRIDE = "_colonnade_override"
"""Attribute of a class made by `override_forward`: (mark, forward, function that restores the instance's forward() or None)."""

_subclasses: dict[tuple[type, type], type] = {}
"""The classes of `subclass_with`, by base and kind."""


def override_forward(module: nn.Module, forward: Callable[..., Any], mark: str = "", share_class: bool = False) -> None:
    """Replace the module's forward pass by `forward(module, before, *args, **kwargs)`; `before(module, ...)` runs the previous one.

    Args:
        module: The module; its class changes.
        forward: The new forward pass.
        mark: The name by which `restore_forward` finds this override.
        share_class: Give all modules of the same class the same new class, because a list of blocks is recognized by the class of
            its members. `forward` must then be the same function for all of these modules.
    """
    kind: Any = type(module)
    given = vars(module).pop("forward", None)
    if given is None:
        # Subclasses are weakly referenced by their class; a table would keep the classes of deleted modules alive.
        made = kind.__subclasses__() if share_class else []
        made = [subclass for subclass in made if vars(subclass).get(_OVERRIDE) == (mark, forward, None)]
        module.__class__ = made[0] if made else _overridden(kind, kind.forward, forward, mark, None)
    elif getattr(given, "__self__", None) is module:
        method = given.__func__  # the bound method would keep the module alive
        module.__class__ = _overridden(kind, method, forward, mark, lambda self: MethodType(method, self))
    else:
        before = lambda self, *args, **kwargs: given(*args, **kwargs)  # noqa: E731
        module.__class__ = _overridden(kind, before, forward, mark, lambda self: given)


def _overridden(kind: Any, before: Callable[..., Any], forward: Callable[..., Any], mark: str, own: Any) -> Any:
    @functools.wraps(kind.forward)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, before, *args, **kwargs)

    return type(
        kind.__name__, (kind,), {"__module__": kind.__module__, "forward": run, _OVERRIDE: (mark, forward, own)}
    )


def restore_forward(module: nn.Module, mark: str) -> None:
    """Undo `override_forward` with this mark. Does nothing if the class of the module was changed again afterwards.

    A class that FSDP2 has derived from the overriding class stays, so the override stays in effect.
    """
    kind: Any = type(module)
    found, _, own = vars(kind).get(_OVERRIDE, ("", None, None))
    if mark and found == mark:
        module.__class__ = kind.__mro__[1]
        if own is not None:
            vars(module)["forward"] = own(module)


def subclass_with(base: type, kind: type) -> Any:
    """A class that inherits from `base` and `kind` and has the name of `kind`; cached, so equal arguments return the same class."""
    if (base, kind) not in _subclasses:
        _subclasses[base, kind] = type(kind.__name__, (base, kind), {"__module__": kind.__module__})
    return _subclasses[base, kind]


def has_hooks(module: nn.Module) -> bool:
    """Whether the module has forward or backward hooks."""
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


class ModelHook:
    """Base class of hooks that belong to a single model: copies and pickles of the model do not contain the hook."""

    def __init__(self, act: Callable[..., None] | None = None) -> None:
        self._act = act

    def __call__(self, *args: Any) -> None:
        if self._act is not None:
            self._act(*args)

    def __reduce__(self) -> tuple[type[ModelHook], tuple[()]]:
        return ModelHook, ()

"""The one way to change what a module does when it is called: a class of its own, which inherits the class it had.

Not a method on the instance: that would belong to this module in a copy of it too, and would be a cycle that keeps the
weights in memory until Python looks for cycles. `override_forward` replaces a forward pass, and `restore_forward` takes that
back. `subclass_with` makes a class for what is more than a forward pass: calls that are watched, lists with absent members.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

_OVERRIDE = "_colonnade_override"
"""Of a class that `override_forward` made: (mark, forward, what gives back the forward() that the instance had or None)."""

_subclasses: dict[tuple[type, type], type] = {}
"""Classes that `subclass_with` made, by base and kind."""


def override_forward(module: nn.Module, forward: Callable[..., Any], mark: str = "", share_class: bool = False) -> None:
    """Let `forward(module, before, *args, **kwargs)` run for the module; `before(module, ...)` is its forward pass so far.

    `mark`: a name by which `restore_forward` finds it again. With `share_class`, modules of one class get one class again, by
    which others recognise a list of blocks; for a `forward` that is the same function for all of them.
    """
    kind: Any = type(module)
    given = vars(module).pop("forward", None)
    if given is None:
        # Looked for among the subclasses, which a class knows weakly: a table would keep classes of modules that are gone.
        made = kind.__subclasses__() if share_class else []
        made = [each for each in made if vars(each).get(_OVERRIDE) == (mark, forward, None)]
        module.__class__ = made[0] if made else _overridden(kind, kind.forward, forward, mark, None)
    elif getattr(given, "__self__", None) is module:
        method = given.__func__  # the bound method would hold the module
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
    """Take back `override_forward` with this mark, where the class of the module has not been changed since.

    A class that FSDP2 has put around it stays, with the override inside.
    """
    kind: Any = type(module)
    found, _, own = vars(kind).get(_OVERRIDE, ("", None, None))
    if mark and found == mark:
        module.__class__ = kind.__mro__[1]
        if own is not None:
            vars(module)["forward"] = own(module)


def subclass_with(base: type, kind: type) -> Any:
    """A class of the same name as `kind` that inherits `base` first; the same one each time."""
    if (base, kind) not in _subclasses:
        _subclasses[base, kind] = type(kind.__name__, (base, kind), {"__module__": kind.__module__})
    return _subclasses[base, kind]


def has_hooks(module: nn.Module) -> bool:
    """Whether anything watches or changes its calls, or their backward passes."""
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


class ModelHook:
    """A hook that belongs to one model alone: a copy of the model, or one that was pickled, does without it."""

    def __init__(self, act: Callable[..., None] | None = None) -> None:
        self._act = act

    def __call__(self, *args: Any) -> None:
        if self._act is not None:
            self._act(*args)

    def __reduce__(self) -> tuple[type[ModelHook], tuple[()]]:
        return ModelHook, ()

"""The hooks of a trainer: built, put in order, called; an error is held until all ranks can raise it together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from colonnade.errors import ConfigError, HookError, TrainerError
from colonnade.logging import get_dist_logger
from colonnade.registry import HOOKS
from colonnade.trainer.hooks.base import BaseHook

POINTS = (
    "after_hook_is_attached",
    "before_train",
    "after_train",
    "before_train_epoch",
    "after_train_epoch",
    "before_train_iter",
    "after_train_iter",
    "before_test",
    "after_test",
    "before_test_epoch",
    "after_test_epoch",
    "before_test_iter",
    "after_test_iter",
    "on_record",
)

HookLike = BaseHook | Mapping[str, Any]
"""A hook, or dict(type="LossHook", ...) with the arguments of one."""


class HookList:
    """Calls hooks in order. A hook that raises is not called again, the others are."""

    def __init__(self, trainer: Any, hooks: Iterable[HookLike]) -> None:
        self._trainer = trainer
        self.hooks = sorted((build_hook(hook) for hook in hooks), key=lambda hook: hook.priority)
        self.held: TrainerError | None = None
        """The first error of this rank that the other ranks do not know of yet."""
        self._calls: dict[str, list[tuple[BaseHook, Callable[..., None]]]] = {
            point: [(hook, getattr(hook, point)) for hook in self.hooks if _overrides(hook, point)] for point in POINTS
        }

    def call(self, point: str, *args: Any) -> None:
        """Call every hook that has something to do at `point`; errors are held."""
        for hook, method in tuple(self._calls[point]):
            try:
                method(self._trainer, *args)
            except Exception as error:
                self._fail(hook, point, error)

    def hold(self, error: TrainerError) -> None:
        """Keep an error until the ranks can raise it together; the first one counts."""
        if self.held is None:
            self.held = error
        else:
            get_dist_logger().warning(f"after an error: {error}")

    def close(self) -> None:
        """Call every hook's `close`, whatever has happened."""
        for hook in self.hooks:
            try:
                hook.close()
            except Exception as error:
                get_dist_logger().warning(f"{type(hook).__name__}.close(): {type(error).__name__}: {error}")

    def state_dict(self) -> dict[str, Any]:
        """The states of all hooks that have one, by class; a number tells those of one class apart."""
        states = {}
        for name, hook in self._named():
            try:
                state = hook.state_dict()
            except Exception as error:
                self._fail(hook, "state_dict", error)
            else:
                states.update({name: state} if state else {})
        return states

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Give every hook its state; one that had none goes on as it is."""
        for name, hook in self._named():
            if name in states:
                try:
                    hook.load_state_dict(states[name])
                except Exception as error:
                    self._fail(hook, "load_state_dict", error)

    def _named(self) -> list[tuple[str, BaseHook]]:
        seen: dict[str, int] = {}
        named = []
        for hook in self.hooks:
            name = type(hook).__name__
            seen[name] = seen.get(name, 0) + 1
            named.append((name if seen[name] == 1 else f"{name} {seen[name]}", hook))
        return named

    def _fail(self, hook: BaseHook, point: str, error: Exception) -> None:
        where = f"epoch {self._trainer.cur_epoch}, step {self._trainer.cur_step}"
        told = HookError(
            f"hook {type(hook).__name__} failed in {point} ({where}): {type(error).__name__}: {error}",
            code=None if getattr(error, "code", None) else "C091",
        )
        told.__cause__ = error
        self.hold(told)
        for calls in self._calls.values():
            calls[:] = [entry for entry in calls if entry[0] is not hook]


def build_hook(hook: HookLike) -> BaseHook:
    """A hook, or what a config says of one."""
    if isinstance(hook, Mapping):
        settings = dict(hook)
        if "type" not in settings:
            raise ConfigError(f"a hook of a config is dict(type='LossHook', ...), not {dict(hook)!r}", code="C092")
        name = settings.pop("type")
        try:
            hook = HOOKS.get_module(name)(**settings)
        except TypeError as error:
            raise ConfigError(
                f"hook {name} could not be built with {settings or 'no arguments'}: {error}", code="C092"
            ) from error
    if not isinstance(hook, BaseHook):
        raise ConfigError(
            f"a hook inherits BaseHook, or is dict(type='LossHook', ...); this is a {type(hook).__name__}", code="C092"
        )
    return hook


def _overrides(hook: BaseHook, point: str) -> bool:
    return point in vars(hook) or getattr(type(hook), point) is not getattr(BaseHook, point)

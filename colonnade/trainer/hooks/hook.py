"""`BaseHook`, with all points at which a Trainer calls hooks, and `HookList`, which calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from colonnade.errors import ConfigError, HookError, TrainerError
from colonnade.logging import get_dist_logger
from colonnade.registry import HOOKS

if TYPE_CHECKING:
    from colonnade.trainer.records import StepRecord
    from colonnade.trainer.trainer import Trainer


class BaseHook:
    """Base class of hooks. Override the methods you need; register a hook in `HOOKS` to name it in a config.

    Hooks with a lower `priority` run first, hooks of equal priority in the given order. All ranks have the same hooks and
    call them at the same points, so a hook may communicate. An error in a hook of any rank is raised on every rank, between
    two steps. `output`, `label` and `loss` are None on pipeline stages other than the last, and on a rank that has run out
    of batches before the others.

    Example::

        from colonnade.trainer import BaseHook

        class PrintLoss(BaseHook):
            def on_record(self, trainer, record):
                if trainer.context.get_global_rank() == 0:
                    print(record.step, record.loss)
    """

    needs_loss = False
    """Whether evaluation must compute a loss for this hook."""

    def __init__(self, priority: int = 10) -> None:
        self.priority = priority

    def after_hook_is_attached(self, trainer: Trainer) -> None:
        """Called when the hook is attached to a trainer; check arguments here."""

    def before_train(self, trainer: Trainer) -> None:
        """Called when `fit` starts."""

    def after_train(self, trainer: Trainer) -> None:
        """Called when `fit` ends, also after an error on all ranks (`trainer.failed`).

        Not called after an error on this rank only.
        """

    def before_train_epoch(self, trainer: Trainer) -> None:
        """Called when an epoch starts or is resumed."""

    def after_train_epoch(self, trainer: Trainer) -> None:
        """Called when an epoch ends, also if `max_steps` ends it."""

    def before_train_iter(self, trainer: Trainer) -> None:
        """Called before training on a batch."""

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Tensor | None) -> None:
        """Called after training on a batch. `trainer.step_done`: whether the batch completed an optimizer step."""

    def before_test(self, trainer: Trainer) -> None:
        """Called when an evaluation starts."""

    def after_test(self, trainer: Trainer) -> None:
        """Called when an evaluation ends."""

    def before_test_epoch(self, trainer: Trainer) -> None:
        """Called when the loop over the test data starts."""

    def after_test_epoch(self, trainer: Trainer) -> None:
        """Called when the loop over the test data ends."""

    def before_test_iter(self, trainer: Trainer) -> None:
        """Called before the forward pass of a test batch."""

    def after_test_iter(self, trainer: Trainer, output: Any, label: Any, loss: Tensor | None) -> None:
        """Called after the forward pass of a test batch."""

    def on_record(self, trainer: Trainer, record: StepRecord) -> None:
        """Called when the numbers of a step are known on every rank: one step later, to avoid a device synchronization."""

    def close(self) -> None:
        """Called last, after any error too. Must not communicate, because other ranks may have exited."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints. Called on all ranks together, so the method may communicate."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned."""

    def init_runner_states(self, trainer: Trainer, key: str, value: Any) -> None:
        """Set an entry of `trainer.states` to `value` unless the entry exists."""
        trainer.states.setdefault(key, value)


def checked_interval(interval: int) -> int:
    """Return `interval` if it is an int >= 1; raise ConfigError otherwise."""
    if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
        raise ConfigError(f"interval is {interval!r}; it must be an int >= 1, a number of epochs or steps", code="C092")
    return interval


# --- The hooks of a trainer, in calling order; an error stays pending until all ranks can raise it together ---


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
"""A hook, or dict(type="LossHook", ...) with its arguments."""


class HookList:
    """Calls hooks in order. A hook that has raised is not called again; the other hooks are."""

    def __init__(self, trainer: Any, hooks: Iterable[HookLike]) -> None:
        self._trainer = trainer
        self.hooks = sorted((build_hook(hook) for hook in hooks), key=lambda hook: hook.priority)
        self.pending: TrainerError | None = None
        """The pending error: the first error of this rank that the other ranks do not know yet."""
        self._calls: dict[str, list[tuple[BaseHook, Callable[..., None]]]] = {
            point: [
                (hook, getattr(hook, point))
                for hook in self.hooks
                if point in vars(hook) or getattr(type(hook), point) is not getattr(BaseHook, point)
            ]
            for point in POINTS
        }

    def call(self, point: str, *args: Any) -> None:
        """Call the method `point` of every hook that overrides it.

        Errors stay pending until all ranks can raise them together.
        """
        for hook, method in tuple(self._calls[point]):
            try:
                method(self._trainer, *args)
            except Exception as error:
                self._fail(hook, point, error)

    def hold(self, error: TrainerError) -> None:
        """Keep an error pending until all ranks can raise it together. Only the first error is kept."""
        if self.pending is None:
            self.pending = error
        else:
            get_dist_logger().warning(f"after an error: {error}")

    def close(self) -> None:
        """Call `close` of every hook; errors are logged as warnings."""
        for hook in self.hooks:
            try:
                hook.close()
            except Exception as error:
                get_dist_logger().warning(f"{type(hook).__name__}.close(): {type(error).__name__}: {error}")

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all hooks, by class name; hooks of the same class are numbered."""
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
        """Load the state of every hook with an entry in `states`."""
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
        failure = HookError(
            f"hook {type(hook).__name__} failed in {point} ({where}): {type(error).__name__}: {error}",
            code=None if getattr(error, "code", None) else "C091",
        )
        failure.__cause__ = error
        self.hold(failure)
        for calls in self._calls.values():
            calls[:] = [entry for entry in calls if entry[0] is not hook]


def build_hook(hook: HookLike) -> BaseHook:
    """Build a hook from a dict as in a config; return a hook unchanged."""
    if isinstance(hook, Mapping):
        settings = dict(hook)
        if "type" not in settings:
            raise ConfigError(f"a hook in a config is dict(type='LossHook', ...), not {dict(hook)!r}", code="C092")
        name = settings.pop("type")
        try:
            hook = HOOKS.get_module(name)(**settings)
        except TypeError as error:
            raise ConfigError(
                f"the hook {name} cannot be built with {settings or 'no arguments'}: {error}", code="C092"
            ) from error
    if not isinstance(hook, BaseHook):
        raise ConfigError(
            "a hook must be an object that inherits BaseHook, or dict(type='LossHook', ...), but it is a "
            f"{type(hook).__name__}",
            code="C092",
        )
    return hook

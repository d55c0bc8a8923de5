"""The contract of a hook: what a trainer calls, and when."""

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
    """Something that happens beside training. Override what you need; register it in `HOOKS` to name it in a config.

    Hooks with a lower `priority` are called first, hooks of the same priority in the order in which they were given.
    Every rank has every hook and calls it at the same points, so a hook may communicate; the error of a hook is
    raised on every rank, between two steps. Values of `output`, `label` and `loss` are None where this rank has none:
    on other stages of a pipeline than the last, and where a rank has run out of batches before the others.
    """

    needs_loss = False
    """Whether an evaluation must have a loss for it."""

    def __init__(self, priority: int = 10) -> None:
        self.priority = priority

    def after_hook_is_attached(self, trainer: Trainer) -> None:
        """The hook has been given to a trainer; the place for checks."""

    def before_train(self, trainer: Trainer) -> None:
        """`fit` begins."""

    def after_train(self, trainer: Trainer) -> None:
        """`fit` ends, also when another hook has failed (`trainer.failed`); not after an error of one rank alone."""

    def before_train_epoch(self, trainer: Trainer) -> None:
        """An epoch begins, or goes on after it was resumed."""

    def after_train_epoch(self, trainer: Trainer) -> None:
        """An epoch ends, or `max_steps` ends it."""

    def before_train_iter(self, trainer: Trainer) -> None:
        """A batch is about to be learnt from."""

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Tensor | None) -> None:
        """A batch has been learnt from; `trainer.step_done` says whether it ended an optimizer step."""

    def before_test(self, trainer: Trainer) -> None:
        """An evaluation begins."""

    def after_test(self, trainer: Trainer) -> None:
        """An evaluation ends."""

    def before_test_epoch(self, trainer: Trainer) -> None:
        """The pass over the test data begins."""

    def after_test_epoch(self, trainer: Trainer) -> None:
        """The pass over the test data ends."""

    def before_test_iter(self, trainer: Trainer) -> None:
        """A test batch is about to be run."""

    def after_test_iter(self, trainer: Trainer, output: Any, label: Any, loss: Tensor | None) -> None:
        """A test batch has been run."""

    def on_record(self, trainer: Trainer, record: StepRecord) -> None:
        """The numbers of a step are known, on every rank: one step later, so that nobody waits for them."""

    def close(self) -> None:
        """Always called last, also after any error. Must not communicate: the other ranks may be gone."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of this hook. Called on all ranks together, so it may communicate."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave."""

    def init_runner_states(self, trainer: Trainer, key: str, value: Any) -> None:
        """Put `value` into the states that hooks share, unless another hook has."""
        trainer.states.setdefault(key, value)


def checked_interval(interval: int) -> int:
    """How often a hook acts: every so many epochs or steps."""
    if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
        raise ConfigError(f"interval is a whole number of epochs or steps from 1 on, not {interval!r}", code="C092")
    return interval


# --------------------------------------------------------------------------------------------------
# The hooks of a trainer: built, put in order, called; an error is held until all ranks can raise it together.
# --------------------------------------------------------------------------------------------------


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

"""The contract of a hook: what a trainer calls, and when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from colonnade.errors import ConfigError

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

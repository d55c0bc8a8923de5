"""The trainer: a training loop with hooks, over any engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from colonnade._lazy import lazy_names

if TYPE_CHECKING:
    from colonnade.trainer.hooks.base import BaseHook as BaseHook
    from colonnade.trainer.records import StepRecord as StepRecord
    from colonnade.trainer.trainer import Trainer as Trainer

_NAMES = {
    "BaseHook": "colonnade.trainer.hooks.base",
    "StepRecord": "colonnade.trainer.records",
    "Trainer": "colonnade.trainer.trainer",
}
__all__ = sorted(_NAMES)


def __getattr__(name: str) -> Any:
    return lazy_names(__name__, name, _NAMES)


def __dir__() -> list[str]:
    return sorted([*globals(), *_NAMES])

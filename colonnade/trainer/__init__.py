"""The trainer: a training loop with hooks, over any engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from colonnade._lazy import lazy_names

if TYPE_CHECKING:
    from colonnade.trainer.hooks.base import BaseHook as BaseHook
    from colonnade.trainer.records import StepRecord as StepRecord
    from colonnade.trainer.trainer import Trainer as Trainer

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "colonnade.trainer.hooks.base": "BaseHook",
        "colonnade.trainer.records": "StepRecord",
        "colonnade.trainer.trainer": "Trainer",
    },
)

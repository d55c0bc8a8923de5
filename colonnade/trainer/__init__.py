"""The Trainer: a training loop with hooks for any engine."""

from __future__ import annotations

from colonnade.trainer.hooks.hook import BaseHook
from colonnade.trainer.records import StepRecord
from colonnade.trainer.trainer import Trainer

__all__ = ["BaseHook", "StepRecord", "Trainer"]

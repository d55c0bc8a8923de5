"""The engine: runs training steps with gradient handlers, mixed precision, clipping and pipeline schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from colonnade._imports import lazy_names

if TYPE_CHECKING:
    from colonnade.engine.build import initialize as initialize
    from colonnade.engine.engine import Engine as Engine
    from colonnade.engine.gradient_handler import BaseGradientHandler as BaseGradientHandler
    from colonnade.engine.schedule import BaseSchedule as BaseSchedule

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "colonnade.engine.build": "initialize",
        "colonnade.engine.engine": "Engine",
        "colonnade.engine.gradient_handler": "BaseGradientHandler",
        "colonnade.engine.schedule": "BaseSchedule",
    },
)

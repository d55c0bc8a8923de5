"""The engine: gradient handlers, schedules, and what runs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from colonnade._lazy import lazy_names

if TYPE_CHECKING:
    from colonnade.engine.build import initialize as initialize
    from colonnade.engine.engine import Engine as Engine
    from colonnade.engine.gradient_handler import BaseGradientHandler as BaseGradientHandler
    from colonnade.engine.schedule import BaseSchedule as BaseSchedule

_NAMES = {
    "Engine": "colonnade.engine.engine",
    "BaseGradientHandler": "colonnade.engine.gradient_handler",
    "BaseSchedule": "colonnade.engine.schedule",
    "initialize": "colonnade.engine.build",
}
__all__ = sorted(_NAMES)


def __getattr__(name: str) -> Any:
    return lazy_names(__name__, name, _NAMES)


def __dir__() -> list[str]:
    return sorted([*globals(), *_NAMES])

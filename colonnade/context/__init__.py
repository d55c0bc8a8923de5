"""Modes, layouts, initializers and the context of a process.

Names are looked up on first use, so that layouts can be planned without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from colonnade._lazy import lazy_names

if TYPE_CHECKING:
    from colonnade.config import Config as Config
    from colonnade.context.build import build_layout as build_layout
    from colonnade.context.dist_group_initializer import ProcessGroupInitializer as ProcessGroupInitializer
    from colonnade.context.layout import Axis as Axis
    from colonnade.context.layout import Layout as Layout
    from colonnade.context.parallel_context import ParallelContext as ParallelContext
    from colonnade.context.parallel_mode import ParallelMode as ParallelMode
    from colonnade.context.random import RandomStreams as RandomStreams

_NAMES = {
    "Axis": "colonnade.context.layout",
    "Config": "colonnade.config",
    "Layout": "colonnade.context.layout",
    "ParallelContext": "colonnade.context.parallel_context",
    "ParallelMode": "colonnade.context.parallel_mode",
    "ProcessGroupInitializer": "colonnade.context.dist_group_initializer",
    "RandomStreams": "colonnade.context.random",
    "build_layout": "colonnade.context.build",
}
__all__ = sorted(_NAMES)


def __getattr__(name: str) -> Any:
    return lazy_names(__name__, name, _NAMES)


def __dir__() -> list[str]:
    return sorted([*globals(), *_NAMES])

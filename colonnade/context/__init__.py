"""Parallel modes, layouts, process group initializers, and the parallel context of a process.

Names are looked up on first use, so that layouts can be planned without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from colonnade._imports import lazy_names

if TYPE_CHECKING:
    from colonnade.config import Config as Config
    from colonnade.context.dist_group_initializer import ProcessGroupInitializer as ProcessGroupInitializer
    from colonnade.context.layout import Axis as Axis
    from colonnade.context.layout import Layout as Layout
    from colonnade.context.layout_builder import build_layout as build_layout
    from colonnade.context.parallel_context import ParallelContext as ParallelContext
    from colonnade.context.parallel_mode import ParallelMode as ParallelMode
    from colonnade.context.random import RandomStreams as RandomStreams

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "colonnade.config": "Config",
        "colonnade.context.layout_builder": "build_layout",
        "colonnade.context.dist_group_initializer": "ProcessGroupInitializer",
        "colonnade.context.layout": "Axis Layout",
        "colonnade.context.parallel_context": "ParallelContext",
        "colonnade.context.parallel_mode": "ParallelMode",
        "colonnade.context.random": "RandomStreams",
    },
)

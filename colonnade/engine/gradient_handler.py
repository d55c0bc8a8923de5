"""The public import path of gradient handlers: the built-in handlers, and the base classes of custom handlers."""

from __future__ import annotations

from colonnade.config.settings import SyncOptions
from colonnade.gradients.handler import (
    BaseGradientHandler,
    DataParallelGradientHandler,
    DemandGradientHandler,
    MoeGradientHandler,
    PipelineSharedModuleGradientHandler,
    PlacementGradientHandler,
    PlannedGradientHandler,
    SequenceParallelGradientHandler,
    ZeROGradientHandler,
)
from colonnade.gradients.sums import Reduction

__all__ = [
    "BaseGradientHandler",
    "DataParallelGradientHandler",
    "DemandGradientHandler",
    "MoeGradientHandler",
    "PipelineSharedModuleGradientHandler",
    "PlacementGradientHandler",
    "PlannedGradientHandler",
    "Reduction",
    "SequenceParallelGradientHandler",
    "SyncOptions",
    "ZeROGradientHandler",
]

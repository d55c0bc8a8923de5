"""Gradient handlers: the built-in ones, and the base classes of custom ones."""

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

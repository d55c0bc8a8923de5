"""Gradient handlers: the built-in ones, and the base classes for one's own."""

from colonnade.engine.gradient_handler.base import (
    BaseGradientHandler,
    DemandGradientHandler,
    PlannedGradientHandler,
)
from colonnade.engine.gradient_handler.built_in import (
    DataParallelGradientHandler,
    MoeGradientHandler,
    PipelineSharedModuleGradientHandler,
    PlacementGradientHandler,
    SequenceParallelGradientHandler,
    ZeROGradientHandler,
)
from colonnade.reduce.options import SyncOptions
from colonnade.reduce.records import Reduction

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

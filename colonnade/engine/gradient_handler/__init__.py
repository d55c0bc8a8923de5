"""Gradient handlers: the built-in ones, and the base classes for one's own."""

from colonnade.engine.gradient_handler._options import SyncOptions
from colonnade.engine.gradient_handler._reduction import Reduction
from colonnade.engine.gradient_handler.base import (
    BaseGradientHandler,
    DemandGradientHandler,
    PlannedGradientHandler,
)
from colonnade.engine.gradient_handler.data_parallel import DataParallelGradientHandler
from colonnade.engine.gradient_handler.moe import MoeGradientHandler
from colonnade.engine.gradient_handler.pipeline_shared import PipelineSharedModuleGradientHandler
from colonnade.engine.gradient_handler.placed import PlacementGradientHandler
from colonnade.engine.gradient_handler.sequence_parallel import SequenceParallelGradientHandler
from colonnade.engine.gradient_handler.zero import ZeROGradientHandler

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

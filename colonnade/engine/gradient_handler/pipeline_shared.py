"""Gradients of parameters that live at several pipeline stages."""

from __future__ import annotations

from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.gradient_handler.base import DemandGradientHandler
from colonnade.registry import GRADIENT_HANDLER


@GRADIENT_HANDLER.register_module
class PipelineSharedModuleGradientHandler(DemandGradientHandler):
    """Sums the gradients of a tied parameter over its stages; each stage has its own part of it."""

    modes = frozenset({ParallelMode.PIPELINE})
    reason = "tied parameters: each stage has a part of the gradient"

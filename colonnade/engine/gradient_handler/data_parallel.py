"""Gradients of replicas that see different samples: a mean over the data mode."""

from __future__ import annotations

from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.gradient_handler.base import DemandGradientHandler
from colonnade.registry import GRADIENT_HANDLER


@GRADIENT_HANDLER.register_module
class DataParallelGradientHandler(DemandGradientHandler):
    """Sums over DATA and divides by the number of ranks that saw distinct data; a no-op on one data rank."""

    modes = frozenset({ParallelMode.DATA})
    reason = "data parallelism: replicas see different samples"

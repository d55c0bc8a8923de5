"""Gradients of replicas that see different tokens of the same sequences."""

from __future__ import annotations

from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.gradient_handler.base import DemandGradientHandler
from colonnade.registry import GRADIENT_HANDLER


@GRADIENT_HANDLER.register_module
class SequenceParallelGradientHandler(DemandGradientHandler):
    """Sums over data and sequence at once (SEQUENCE_DP) and divides by the number of distinct parts."""

    modes = frozenset({ParallelMode.DATA, ParallelMode.SEQUENCE, ParallelMode.SEQUENCE_DP})
    reason = "sequence parallelism: ranks see different tokens"

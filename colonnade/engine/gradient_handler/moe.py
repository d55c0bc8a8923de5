"""Gradients of models with experts: dense parameters over data, experts over their expert-data twin."""

from __future__ import annotations

from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.gradient_handler.base import DemandGradientHandler
from colonnade.registry import GRADIENT_HANDLER


@GRADIENT_HANDLER.register_module
class MoeGradientHandler(DemandGradientHandler):
    """Dense parameters: a mean over DATA. Experts: a sum over EXPERT_DATA, divided by all who sent tokens.

    An expert's gradient already holds the tokens of every rank of its expert group, so the divisor is the
    number of data ranks and not the size of the (smaller) group that communicates.
    """

    modes = frozenset({ParallelMode.DATA, ParallelMode.EXPERT_DATA, ParallelMode.MOE_DATA})
    reason = "expert parallelism: experts are reduced over their expert-data twin"

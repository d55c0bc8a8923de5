"""The built-in handlers: each does what the placements demand over its modes."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.gradient_handler.base import BaseGradientHandler, DemandGradientHandler
from colonnade.errors import GradientError
from colonnade.reduce.records import Reduction, group_reductions
from colonnade.registry import GRADIENT_HANDLER


@GRADIENT_HANDLER.register_module
class DataParallelGradientHandler(DemandGradientHandler):
    """Sums over DATA and divides by the number of ranks that saw distinct data; does nothing on one data rank."""

    modes = frozenset({ParallelMode.DATA})
    reason = "data parallelism: replicas see different samples"


@GRADIENT_HANDLER.register_module
class MoeGradientHandler(DemandGradientHandler):
    """Dense parameters: a mean over DATA. Experts: a sum over EXPERT_DATA, divided by all who sent tokens.

    An expert's gradient already holds the tokens of every rank of its expert group, so the divisor is the
    number of data ranks and not the size of the (smaller) group that communicates.
    """

    modes = frozenset({ParallelMode.DATA, ParallelMode.EXPERT_DATA, ParallelMode.MOE_DATA})
    reason = "expert parallelism: experts are reduced over their expert-data twin"


@GRADIENT_HANDLER.register_module
class SequenceParallelGradientHandler(DemandGradientHandler):
    """Sums over data and sequence at once (SEQUENCE_DP) and divides by the number of distinct parts."""

    modes = frozenset({ParallelMode.DATA, ParallelMode.SEQUENCE, ParallelMode.SEQUENCE_DP})
    reason = "sequence parallelism: ranks see different tokens"


@GRADIENT_HANDLER.register_module
class PipelineSharedModuleGradientHandler(DemandGradientHandler):
    """Sums the gradients of a tied parameter over its stages; each stage has its own part of it."""

    modes = frozenset({ParallelMode.PIPELINE})
    reason = "tied parameters: each stage has a part of the gradient"


@GRADIENT_HANDLER.register_module
class PlacementGradientHandler(DemandGradientHandler):
    """Does whatever reduction the placements demand, over any mode."""

    reason = "placements that owe a sum over another mode"


@GRADIENT_HANDLER.register_module
class ZeROGradientHandler(BaseGradientHandler):
    """Asks an optimizer that sums gradients itself, by its `sync_grad()`.

    Such an optimizer may have `prepare(last)`, called before each backward pass, and `set_scale(scale)`.
    """

    reason = "the optimizer sums gradients itself and has sync_grad()"

    def __init__(self, model: nn.Module, optimizer: Any = None) -> None:
        super().__init__(model, optimizer)
        if not callable(getattr(optimizer, "sync_grad", None)):
            raise GradientError(
                f"ZeROGradientHandler needs an optimizer with sync_grad(), not {type(optimizer).__name__}; "
                f"use DataParallelGradientHandler for an ordinary one",
                code="C042",
            )

    def prepare(self, last: bool) -> None:
        if callable(getattr(self._optimizer, "prepare", None)):
            self._optimizer.prepare(last)

    def set_scale(self, scale: float | Tensor | None) -> bool:
        if not callable(getattr(self._optimizer, "set_scale", None)):
            return False
        self._optimizer.set_scale(scale)
        return True

    def handle_gradient(self) -> None:
        self._optimizer.sync_grad()

    def covers(self) -> list[Reduction]:
        """All that is owed by the parameters in the optimizer's groups."""
        owned = {id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}
        return group_reductions(
            (demand, factor) for demand in self.demands() if id(demand.parameter) in owned for factor in demand.owed
        )

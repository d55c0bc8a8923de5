"""Gradients that the optimizer reduces itself, because it shards them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from colonnade.engine.gradient_handler._reduction import Reduction, group_reductions
from colonnade.engine.gradient_handler.base import BaseGradientHandler
from colonnade.errors import GradientError
from colonnade.registry import GRADIENT_HANDLER


@GRADIENT_HANDLER.register_module
class ZeROGradientHandler(BaseGradientHandler):
    """Asks the optimizer's `sync_grad()`, which reduces every gradient the optimizer owns."""

    reason = "the optimizer shards gradients and has sync_grad()"

    def __init__(self, model: nn.Module, optimizer: Any = None) -> None:
        super().__init__(model, optimizer)
        if not callable(getattr(optimizer, "sync_grad", None)):
            raise GradientError(
                f"ZeROGradientHandler needs an optimizer with sync_grad(), not {type(optimizer).__name__}; "
                f"use DataParallelGradientHandler for an ordinary one"
            )

    def prepare(self, last: bool) -> None:
        """Before each backward pass: an optimizer with `prepare()` may sum while it runs."""
        if callable(getattr(self._optimizer, "prepare", None)):
            self._optimizer.prepare(last)

    def set_scale(self, scale: float | Tensor | None) -> None:
        """A further factor on the gradients of this step."""
        if callable(getattr(self._optimizer, "set_scale", None)):
            self._optimizer.set_scale(scale)

    def scaled(self) -> list[nn.Parameter]:
        """The parameters whose gradients the optimizer multiplies by `set_scale` itself."""
        if not callable(getattr(self._optimizer, "set_scale", None)):
            return []
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def handle_gradient(self) -> None:
        self._optimizer.sync_grad()

    def covers(self) -> list[Reduction]:
        """All that is owed by the parameters in the optimizer's groups."""
        owned = {id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}
        return group_reductions(
            (demand, factor) for demand in self.demands() if id(demand.parameter) in owned for factor in demand.owed
        )

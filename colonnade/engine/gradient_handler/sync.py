"""Gradient synchronisation of an engine: the handlers in their order, the executor they share, the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from colonnade.comm.messages import agreed_errors
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.gradient_handler._execute import Executor
from colonnade.engine.gradient_handler._options import SyncOptions
from colonnade.engine.gradient_handler._probe import probe
from colonnade.engine.gradient_handler._reduction import Demand, read_demands
from colonnade.engine.gradient_handler._settings import read_options
from colonnade.engine.gradient_handler.base import BaseGradientHandler, PlannedGradientHandler
from colonnade.engine.gradient_handler.ledger import Covered, Ledger, is_waived, require_complete, settle
from colonnade.engine.gradient_handler.select import attach_automatic, describe
from colonnade.engine.gradient_handler.zero import ZeROGradientHandler
from colonnade.errors import ConfigError
from colonnade.logging import get_dist_logger
from colonnade.parallel.dtensor import local_part
from colonnade.registry import GRADIENT_HANDLER


class GradientSync:
    """Runs every handler once per step: the automatic ones first, then the named ones in the config's order.

    Automatic reductions start during backward, so they are waited for before a user's handler may look at
    a gradient. All sums are linear: the order does not change the result.
    """

    def __init__(
        self,
        handlers: Sequence[BaseGradientHandler],
        executor: Executor,
        ledger: Ledger,
        apart: Sequence[nn.Parameter] = (),
    ) -> None:
        """`apart`: parameters that neither the executor nor a sharded optimizer sums, so that nobody scales them."""
        self.handlers = list(handlers)
        self.executor = executor
        self.ledger = ledger
        self._apart = list(apart)
        self._scale: float | Tensor | None = None
        self._sharded = [handler for handler in handlers if isinstance(handler, ZeROGradientHandler)]

    def prepare(self, last: bool) -> None:
        """Before each backward pass."""
        self.executor.prepare(last)
        for handler in self._sharded:
            handler.prepare(last)

    def finish(self) -> None:
        """After the last backward pass: every gradient is final when this returns."""
        for handler in self.handlers:
            handler.handle_gradient()
        self.executor.finish()
        self._scale_apart(self._scale)
        self._scale = None

    def set_scale(self, scale: float | Tensor | None) -> None:
        """A further factor on the gradients of this step."""
        self._scale = scale
        self.executor.set_scale(scale)
        for handler in self._sharded:
            handler.set_scale(scale)

    def close(self) -> None:
        self.executor.close()

    def _scale_apart(self, scale: float | Tensor | None) -> None:
        if scale is not None:
            for parameter in self._apart:
                if parameter.grad is not None:
                    local_part(parameter.grad).mul_(scale)


def build_sync(
    model: nn.Module,
    optimizer: Any,
    context: ParallelContext,
    named: Sequence[Any],
    options: dict[str, Any],
    bucket_all: bool = False,
) -> GradientSync:
    """Build the named handlers, let the ledger see what they do, attach what is missing. Collective.

    `bucket_all`: gradients that owe no reduction lie in flat buckets too, for a flat optimizer step.
    """
    options = dict(options)
    waive = options.pop("waive", None) or ()
    automatic = options.pop("automatic", True)
    rank = context.get_global_rank()
    demands = read_demands(model, context.layout, rank)
    mine = [build_gradient_handler(entry, model, optimizer) for entry in named]
    if callable(getattr(optimizer, "sync_grad", None)) and not any(isinstance(h, ZeROGradientHandler) for h in mine):
        mine.insert(0, ZeROGradientHandler(model, optimizer))
    for handler in mine:
        handler.attach(context)
    with agreed_errors(context.device):
        covered = [entry for handler in mine for entry in _covered(handler, demands, context, waive)]
        ledger = settle(demands, covered, context.layout, rank, waive)
    attached = attach_automatic(ledger.open_rows(), model, optimizer, options) if automatic else []
    for added in attached:
        added.attach(context)
        covered += [(type(added).__name__, reduction) for reduction in added.plan()]
    with agreed_errors(context.device):
        ledger = settle(demands, covered, context.layout, rank, waive)
        require_complete(ledger)
    get_dist_logger().info(describe(attached, mine))
    handlers = [*attached, *mine]
    also = [(demand.name, demand.parameter) for demand in demands] if bucket_all else []
    executor = _shared_executor(handlers, context, also, read_options(options))
    return GradientSync(handlers, executor, ledger, _apart(demands, handlers, also))


def _apart(
    demands: Sequence[Demand], handlers: Sequence[BaseGradientHandler], also: Sequence[tuple[str, nn.Parameter]]
) -> list[nn.Parameter]:
    """Parameters whose gradients come final by themselves (FSDP), owe nothing, or are a user's handler's."""
    scaled = {id(parameter) for _, parameter in also}
    for handler in handlers:
        if isinstance(handler, PlannedGradientHandler):
            scaled.update(id(parameter) for reduction in handler.plan() for parameter in reduction.parameters)
        elif isinstance(handler, ZeROGradientHandler):
            scaled.update(map(id, handler.scaled()))
    return [demand.parameter for demand in demands if id(demand.parameter) not in scaled]


def build_gradient_handler(entry: Any, model: nn.Module, optimizer: Any) -> BaseGradientHandler:
    """A handler from the config: `dict(type="Name", **kwargs)`, or just its name."""
    settings = {"type": entry} if isinstance(entry, str) else dict(entry)
    name = settings.pop("type")
    handler_class = GRADIENT_HANDLER.get_module(name)
    try:
        handler = handler_class(model, optimizer, **settings)
    except TypeError as error:
        raise ConfigError(
            f"gradient_handler: {name} could not be built with {settings or 'no further arguments'}: {error}. It is "
            f"called as {name}(model, optimizer, **the rest of its dict in the config)."
        ) from error
    if not callable(getattr(handler, "handle_gradient", None)):
        raise ConfigError(f"gradient_handler: {name} has no handle_gradient(); inherit BaseGradientHandler")
    return handler


def _covered(
    handler: BaseGradientHandler, demands: list[Demand], context: ParallelContext, waive: Sequence[str]
) -> list[Covered]:
    reductions = handler.covers()
    if reductions is None:
        reductions = probe(handler, demands, context, lambda name: is_waived(name, waive))
    return [(type(handler).__name__, reduction) for reduction in reductions]


def _shared_executor(
    handlers: Sequence[BaseGradientHandler],
    context: ParallelContext,
    also: list[tuple[str, nn.Parameter]],
    options: SyncOptions,
) -> Executor:
    planned = [handler for handler in handlers if isinstance(handler, PlannedGradientHandler)]
    executor = Executor([(handler.plan(), handler.options) for handler in planned], context, also, options)
    for handler in planned:
        handler.use_executor(executor)
    return executor

"""Gradient synchronisation of an engine: the handlers in their order, the sums they share, the ledger."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from colonnade.comm.messages import agreed_errors, note_of
from colonnade.comm.rank_group import RankGroup
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import ConfigError, GradientError
from colonnade.gradients.handler import (
    BaseGradientHandler,
    PlannedGradientHandler,
    ZeROGradientHandler,
    attach_automatic,
    describe,
)
from colonnade.gradients.ledger import Covered, Ledger, is_waived, match, require_complete
from colonnade.gradients.probe import CallLog, probe
from colonnade.gradients.sums import Demand, Grouped, Reduction, Shards, SumPlan, group_plans, make_sums, read_demands
from colonnade.gradients.synchroniser import StepOutcome, Synchroniser
from colonnade.logging import get_dist_logger
from colonnade.optim.bucket_step import scale_all
from colonnade.registry import GRADIENT_HANDLER


class GradientSync:
    """Runs every handler once per step: the automatic ones first, then the named ones in the config's order.

    Automatic sums start during backward, so they are waited for before a user's handler may look at
    a gradient. All sums are linear: the order does not change the result. `loose` are the parameters of each handler
    whose gradients are in no bucket (and last those that no handler sums: FSDP's, say, which are final when they come).
    """

    def __init__(
        self,
        handlers: Sequence[BaseGradientHandler],
        synchroniser: Synchroniser,
        ledger: Ledger,
        loose: Sequence[tuple[BaseGradientHandler | None, Sequence[nn.Parameter]]] = (),
    ) -> None:
        self.handlers = list(handlers)
        self.synchroniser = synchroniser
        self.ledger = ledger
        self._loose = list(loose)
        self.before_pass: Callable[[], None] | None = None
        """Called before anything else of a backward pass: gathers that run on must end."""
        self.log: CallLog | None = None
        """The log of the collectives that handlers make; the guard sets one."""

    def prepare(self, last: bool) -> None:
        """Before each backward pass."""
        if self.before_pass is not None:
            self.before_pass()
        self.synchroniser.prepare(last)
        for handler in self.handlers:
            handler.prepare(last)

    def finish(self, scale: float | Tensor | None = None, *, counts: bool = False) -> StepOutcome:
        """After the last backward pass: every gradient is final when this returns.

        `scale` and `counts` as of `Synchroniser.wait`, whose outcome is returned.
        """
        # Gradients that were changed by hand are an error of this rank alone. The other ranks have begun to sum: they learn
        # of it in the sums, so that all ranks raise the error, and none waits for this one.
        try:
            self.synchroniser.check_untouched()
        except GradientError as error:
            self.synchroniser.fail(note_of(error))

        # Sums of planned handlers come first: a user's handler may look at any gradient. There is none in a failed step.
        outcome = self.synchroniser.wait(scale, counts=counts)
        if outcome.failed_ranks:
            return outcome

        # Handlers in their order. What is in no bucket is multiplied by its handler, if that can, or afterwards here.
        scaling = [handler for handler in self.handlers if handler.set_scale(outcome.scale)]
        for handler in self.handlers:
            handler.handle_gradient() if self.log is None else self.log.run(handler)
        if outcome.scale is not None:
            unscaled = [p for owner, parameters in self._loose if owner not in scaling for p in parameters]
            scale_all([parameter.grad for parameter in unscaled if parameter.grad is not None], outcome.scale)
        return outcome

    @property
    def world(self) -> RankGroup | None:
        """All ranks, if they have sockets between them on which nothing is on its way, as may be where sums are sharded."""
        if any(bucket.is_sharded for bucket in self.synchroniser.buckets):
            return None
        world = self.synchroniser.groups.get(tuple(range(dist.get_world_size())))
        return world if world is not None and world.sockets is not None else None

    def close(self) -> None:
        for handler in self.handlers:
            handler.close()
        self.synchroniser.close()


BuiltHandler = tuple[BaseGradientHandler, list[Reduction] | None]
"""A named handler and what it says it covers; None: find out by a trial."""


def build_handlers(
    named: Sequence[Any], model: nn.Module, optimizer: Any, context: ParallelContext
) -> list[BuiltHandler]:
    """The handlers that the config names, and that of an optimizer with `sync_grad()`, attached."""
    handlers = [build_gradient_handler(entry, model, optimizer) for entry in named]
    if needs_own_handler(optimizer, handlers):
        handlers.insert(0, ZeROGradientHandler(model, optimizer))
    for handler in handlers:
        handler.attach(context)
    return [(handler, handler.covers()) for handler in handlers]


def needs_own_handler(optimizer: Any, handlers: Sequence[BaseGradientHandler]) -> bool:
    """Whether the optimizer sums gradients itself, and none of these handlers asks it to."""
    asked = any(isinstance(handler, ZeROGradientHandler) for handler in handlers)
    return callable(getattr(optimizer, "sync_grad", None)) and not asked


def build_sync(
    model: nn.Module,
    optimizer: Any,
    context: ParallelContext,
    handlers: Sequence[BuiltHandler],
    options: Mapping[str, Any],
    bucket_all: bool = False,
    shards: Shards | None = None,
) -> GradientSync:
    """Let the ledger see what the named handlers do, attach what is missing, lay out buckets. Collective.

    `bucket_all`: gradients that owe no reduction lie in flat buckets too, for a flat optimizer step. `shards`: what is
    to be sharded over the ranks that share it.
    """
    waive = _waived(options)
    demands = read_demands(model, context.layout, context.get_global_rank())
    mine = [handler for handler, _ in handlers]
    touched: dict[str, str] = {}
    covered = [
        (one, probe(one, demands, context, lambda name: is_waived(name, waive), touched) if said is None else said)
        for one, said in handlers
    ]
    with agreed_errors(context.device):
        found = plan_sync(model, optimizer, context, covered, options, bucket_all, shards, touched)
    get_dist_logger().info(describe(found.attached, mine))
    sums = make_sums(found.grouped, context, shards)
    with agreed_errors(context.device):
        synchroniser = Synchroniser(sums, log=get_dist_logger().info)
    for planner in found.planners:
        planner.use(synchroniser)
    return GradientSync([*found.attached, *mine], synchroniser, found.ledger, _loose(demands, covered, synchroniser))


@dataclass(frozen=True)
class SyncPlan:
    """What is summed on this rank, over which ranks and by whom: the ledger, handlers that came by themselves, all that
    say what they sum, and the parameters of each sum."""

    ledger: Ledger
    attached: Sequence[PlannedGradientHandler]
    planners: Sequence[PlannedGradientHandler]
    grouped: Grouped


def plan_sync(
    model: nn.Module,
    optimizer: Any,
    context: ParallelContext,
    covered: Sequence[tuple[BaseGradientHandler, list[Reduction]]],
    options: Mapping[str, Any],
    bucket_all: bool = False,
    shards: Shards | None = None,
    touched: Mapping[str, str] | None = None,
) -> SyncPlan:
    """Match what the named handlers do (`covered`) with what is owed, and attach the rest. Needs no process group.

    `options`, `bucket_all` and `shards` as of `build_sync`. `touched`: handlers that were seen to change waived parameters, by
    the names of these.
    """
    rank = context.get_global_rank()
    demands = read_demands(model, context.layout, rank)
    entries: list[Covered] = [(type(one).__name__, reduction) for one, found in covered for reduction in found]
    ledger = match(demands, entries, context.layout, rank, _waived(options), touched or {})
    attached, ledger = attach_automatic(ledger, model, optimizer) if options.get("automatic", True) else ([], ledger)
    require_complete(ledger)
    if shards is not None:
        _refuse_by_hand(covered, shards)
    for handler in attached:
        handler.attach(context)
    planned: list[tuple[PlannedGradientHandler, list[Reduction]]] = [(one, one.plan_for(demands)) for one in attached]
    planned += [(handler, found) for handler, found in covered if isinstance(handler, PlannedGradientHandler)]
    plans = [SumPlan(type(handler).__name__, found, handler.options) for handler, found in planned]
    unsummed = [(demand.name, demand.parameter) for demand in demands] if bucket_all or shards is not None else []
    if shards is not None and not bucket_all:
        unsummed = [(name, parameter) for name, parameter in unsummed if id(parameter) in shards.labels]
    transport = {key: value for key, value in options.items() if key not in ("waive", "automatic")}
    grouped = group_plans(plans, context, transport, unsummed, shards)
    return SyncPlan(ledger, attached, [handler for handler, _ in planned], grouped)


def _waived(options: Mapping[str, Any]) -> Sequence[str]:
    """Names of parameters that nobody need synchronise, as patterns."""
    waive = options.get("waive") or ()
    return (waive,) if isinstance(waive, str) else waive


def _refuse_by_hand(covered: Sequence[tuple[BaseGradientHandler, list[Reduction]]], shards: Shards) -> None:
    """Sharded gradients are in slices when a handler is called, at stage 2 since the pass that made them."""
    for handler, reductions in covered:
        for reduction in reductions if not isinstance(handler, PlannedGradientHandler) else ():
            for name, parameter in zip(reduction.names, reduction.parameters, strict=True):
                if id(parameter) in shards.labels:
                    raise GradientError(
                        f"{type(handler).__name__} sums {name!r} by hand, but zero stages 1 and 2 sum gradients into slices "
                        f"themselves; say what to sum in a PlannedGradientHandler, or turn zero off",
                        code="C042",
                    )


def _loose(
    demands: Sequence[Demand],
    covered: Sequence[tuple[BaseGradientHandler, list[Reduction]]],
    synchroniser: Synchroniser,
) -> list[tuple[BaseGradientHandler | None, list[nn.Parameter]]]:
    """The parameters that are in no sum, by who handles them."""
    left = {id(d.parameter): d.parameter for d in demands if id(d.parameter) not in synchroniser.parameters}
    found: list[tuple[BaseGradientHandler | None, list[nn.Parameter]]] = []
    for handler, reductions in covered:
        theirs = [p for reduction in reductions for p in reduction.parameters if left.pop(id(p), None) is not None]
        found.append((handler, theirs))
    return [*found, (None, list(left.values()))]


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
            f"called as {name}(model, optimizer, **the rest of its dict in the config).",
            code="C042",
        ) from error
    if not callable(getattr(handler, "handle_gradient", None)):
        raise ConfigError(
            f"gradient_handler: {name} has no handle_gradient(); inherit BaseGradientHandler", code="C042"
        )
    return handler

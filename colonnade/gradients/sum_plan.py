"""The plan of gradient reductions: which handler reduces which parameters, over which ranks, with which divisor.

`plan_sums` compares the reductions of the named handlers with those that placements require (parallel.demand.owed), assigns the
remaining ones to automatic handlers, and joins all reductions of a parameter into one sum. This is arithmetic on a layout and needs
no process group. `initialize` performs the result, `colonnade plan` estimates its cost, `colonnade explain` prints its ledger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import GradientError
from colonnade.gradients.handler import DemandGradientHandler, PlannedGradientHandler, attach_automatic
from colonnade.gradients.ledger import Ledger, match, require_complete
from colonnade.gradients.sums import Claim, Reduction, Shards, Sum, read_demands, sums_of


@dataclass(frozen=True)
class SumPlan:
    """The sums of one rank, in the order in which all ranks start them, and the ledger of their handlers."""

    sums: Sequence[Sum]
    ledger: Ledger
    attached: Sequence[DemandGradientHandler]
    """The automatic handlers."""
    planned: Sequence[PlannedGradientHandler]
    """All handlers, automatic and named, whose reductions are in `sums`. The others call collectives themselves."""


def plan_sums(
    model: nn.Module,
    optimizer: Any,
    context: ParallelContext,
    claims: Sequence[Claim],
    options: Mapping[str, Any],
    *,
    bucket_all: bool = False,
    shards: Shards | None = None,
    touched: Mapping[str, str] | None = None,
    complete: bool = True,
) -> SumPlan:
    """Plan the gradient reductions of this rank's part of a model.

    Args:
        model: The model of this rank.
        optimizer: The optimizer as it was given to `initialize`.
        context: The parallel context; its layout suffices.
        claims: The named handlers and their reductions.
        options: The config's `sync`.
        bucket_all: Put gradients that need no reduction into buckets, too, for a flat optimizer step.
        shards: The parameters whose gradients are sharded (ZeRO 1 and 2).
        touched: By the names of waived parameters, the handlers that were seen to change their gradients.
        complete: Raise for a reduction without a handler. False where some handlers are unknown and may perform it.

    Raises:
        LedgerError: A reduction has no handler or two, or its ranks or its divisor are wrong.
        GradientError: A handler that calls collectives itself reduces a parameter with sharded gradients.
    """
    rank = context.get_global_rank()
    demands = read_demands(model, context.layout, rank)
    covered = [(type(handler).__name__, reduction) for handler, reductions in claims for reduction in reductions]
    ledger = match(demands, covered, context.layout, rank, waived_patterns(options), touched or {})
    attached, ledger = attach_automatic(ledger, model, optimizer) if options.get("automatic", True) else ([], ledger)
    if complete:
        require_complete(ledger)
    # Handlers that call collectives themselves expect full gradients in `.grad`. Sharded gradients exist as slices only when
    # a handler is called; at stage 2 this is so since the backward pass that made them.
    for handler, reductions in claims if shards is not None else ():
        for reduction in reductions if not isinstance(handler, PlannedGradientHandler) else ():
            for name, parameter in zip(reduction.names, reduction.parameters, strict=True):
                if shards is not None and id(parameter) in shards.labels:
                    raise GradientError(
                        f"{type(handler).__name__} sums {name!r} by hand, but with zero stages 1 and 2 gradients are reduced "
                        f"into slices; declare the reduction in a PlannedGradientHandler, or turn zero off",
                        code="C042",
                    )

    for handler in attached:
        handler.attach(context)
    planned: list[tuple[PlannedGradientHandler, Sequence[Reduction]]] = [
        *((handler, handler.reductions_among(demands)) for handler in attached),
        *((handler, reductions) for handler, reductions in claims if isinstance(handler, PlannedGradientHandler)),
    ]

    # Parameters that need no reduction still get a bucket if a flat optimizer step reads gradients there, or ZeRO assigns each
    # rank a slice of them.
    unsummed = [
        (demand.name, demand.parameter)
        for demand in demands
        if bucket_all or (shards is not None and id(demand.parameter) in shards.labels)
    ]
    transport = {key: value for key, value in options.items() if key not in ("waive", "automatic")}
    sums = sums_of(planned, context, transport, unsummed, shards)
    return SumPlan(sums, ledger, attached, [handler for handler, _ in planned])


def waived_patterns(options: Mapping[str, Any]) -> Sequence[str]:
    """Name patterns of the parameters that are exempt from the ledger check, from the config's `sync`."""
    waive = options.get("waive") or ()
    return (waive,) if isinstance(waive, str) else tuple(waive)

"""Who sums which gradients, over which ranks, divided by what: decided once, for a run, a plan and an explanation.

`plan_sums` compares what the named handlers do with what placements demand (parallel.demand.owed), gives what nobody does to
the automatic handlers, and joins everything that a parameter owes into one sum. It is arithmetic on a layout: no process
group is needed. `initialize` carries the result out, `colonnade plan` costs it, `colonnade explain` prints its ledger.
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
    """The sums of one rank, in the order in which all ranks start them, and the ledger that shows who does what."""

    sums: Sequence[Sum]
    ledger: Ledger
    attached: Sequence[DemandGradientHandler]
    """The automatic handlers."""
    planned: Sequence[PlannedGradientHandler]
    """All handlers, automatic and named, whose reductions are in `sums`. The others sum by hand."""


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
    """Plan the sums of this rank's part of a model. Raises where a sum is owed twice, by nobody, or done otherwise than owed.

    `claims`: the named handlers and their reductions. `options`: the config's `sync`. `bucket_all`: gradients that owe no sum
    lie in buckets too, for a flat step. `shards`: the parameters whose gradients are shared out (ZeRO). `touched`: handlers
    that were seen to change waived parameters, by the names of these. `complete=False`: some handlers are unknown, so what
    nobody does may be theirs.
    """
    rank = context.get_global_rank()
    demands = read_demands(model, context.layout, rank)
    covered = [(type(handler).__name__, reduction) for handler, found in claims for reduction in found]
    ledger = match(demands, covered, context.layout, rank, waived_patterns(options), touched or {})
    attached, ledger = attach_automatic(ledger, model, optimizer) if options.get("automatic", True) else ([], ledger)
    if complete:
        require_complete(ledger)
    if shards is not None:
        _refuse_by_hand(claims, shards)
    for handler in attached:
        handler.attach(context)
    planned: list[tuple[PlannedGradientHandler, Sequence[Reduction]]] = [
        *((handler, handler.plan_for(demands)) for handler in attached),
        *((handler, found) for handler, found in claims if isinstance(handler, PlannedGradientHandler)),
    ]
    # Parameters that owe nothing lie in buckets all the same where a flat step reads them there, or a rank owns a slice of them.
    unsummed = [
        (each.name, each.parameter)
        for each in demands
        if bucket_all or (shards is not None and id(each.parameter) in shards.labels)
    ]
    transport = {key: value for key, value in options.items() if key not in ("waive", "automatic")}
    sums = sums_of(planned, context, transport, unsummed, shards)
    return SumPlan(sums, ledger, attached, [handler for handler, _ in planned])


def waived_patterns(options: Mapping[str, Any]) -> Sequence[str]:
    """Names of parameters that nobody need synchronise, as patterns, from the config's `sync`."""
    waive = options.get("waive") or ()
    return (waive,) if isinstance(waive, str) else tuple(waive)


def _refuse_by_hand(claims: Sequence[Claim], shards: Shards) -> None:
    """Sharded gradients are in slices when a handler is called, at stage 2 since the pass that made them."""
    for handler, reductions in claims:
        for reduction in reductions if not isinstance(handler, PlannedGradientHandler) else ():
            for name, parameter in zip(reduction.names, reduction.parameters, strict=True):
                if id(parameter) in shards.labels:
                    raise GradientError(
                        f"{type(handler).__name__} sums {name!r} by hand, but zero stages 1 and 2 sum gradients into slices "
                        f"themselves; say what to sum in a PlannedGradientHandler, or turn zero off",
                        code="C042",
                    )

"""The records of who sums what, and from the reductions of handlers to the sums that are carried out.

A parameter owes factors (`Demand`), a handler does reductions (`Reduction`), and all factors of a parameter are carried out as one
sum over their joint ranks (`Sum`). `gradients.sum_plan` decides who does what; buckets and the synchroniser carry sums out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from colonnade.config.settings import SyncOptions, half_dtypes
from colonnade.context.layout import Layout
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import ConfigError, LedgerError, did_you_mean
from colonnade.parallel.demand import Owed, joint_ranks, owed
from colonnade.parallel.dtensor import effective_placement
from colonnade.parallel.placement import Placement

HALVES = half_dtypes()

# --- From what is owed to the sums of one rank ----------------------------------------------------


Choice = str | Sequence[str] | Callable[[str, nn.Parameter], bool] | None
"""Which parameters: None for all, name patterns (`"*.bias"`), or a predicate of name and parameter."""


@dataclass(frozen=True, eq=False)
class Reduction:
    """These parameters: the sum of their gradients over `ranks` (a group of `mode`), divided by `divisor`."""

    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    mode: ParallelMode
    ranks: tuple[int, ...]
    divisor: float

    def __str__(self) -> str:
        shown = ", ".join(self.names[:3]) + (f", ... ({len(self.names)})" if len(self.names) > 3 else "")
        return f"sum over {self.mode.name} {list(self.ranks)} / {self.divisor:g}: {shown}"


@dataclass(frozen=True, eq=False)
class Demand:
    """One parameter and the sums it owes on this rank."""

    name: str
    parameter: nn.Parameter
    placement: Placement
    owed: tuple[Owed, ...]


@dataclass(frozen=True)
class Sharding:
    """How the gradients of a sum are shared out: each rank owns one slice of every bucket.

    `keep_whole`: a rank has memory for its whole gradients, and sums them once a step; else buckets take turns in
    little memory and are summed at `every_pass`, or once. `wide`: the owned slice of half-precision gradients is
    kept in fp32. `device`: where the owned slice lies, if not where the gradients do. `give_back`: the final
    gradients go to all ranks, as `.grad`.
    """

    keep_whole: bool = True
    every_pass: bool = False
    wide: bool = False
    device: torch.device | None = None
    give_back: bool = False


@dataclass(frozen=True, eq=False)
class Sum:
    """One sum that is carried out: final gradient = sum over `ranks` / `divisor`.

    `ranks` are global and this rank is among them; `group` is the torch group of exactly these ranks, or None where
    `ranks` is this rank alone. The parameters stand in the same order on every rank of `ranks`; their names may
    differ (a weight that is tied between pipeline stages has one name on each). `labels`, one per parameter, must be
    the same on all these ranks. Without `sharding` every rank gets all of the result.
    """

    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    ranks: tuple[int, ...]
    group: ProcessGroup | None
    divisor: float
    options: SyncOptions = field(default_factory=SyncOptions)
    sharding: Sharding | None = None
    labels: tuple[str, ...] = ()
    between_stages: bool = False
    """Whether the ranks are at several pipeline stages: they come to this sum at unlike moments of a step, and one that
    waited for another in the middle of it would hold up the pipeline. So it is never started early."""

    @property
    def order(self) -> tuple[Any, ...]:
        """The place of the sum among others: all ranks start theirs in ascending order of this."""
        return self.ranks, self.divisor, self.sharding is not None, repr(self.options)


def read_demands(model: nn.Module, layout: Layout, rank: int) -> list[Demand]:
    """What every parameter of the model owes; a parameter with two names counts once, under its first."""
    placed = [(name, p, effective_placement(p, layout, rank)) for name, p in model.named_parameters()]
    return [Demand(name, p, placement, owed(layout, placement, rank)) for name, p, placement in placed]


def choose(demands: Iterable[Demand], which: Choice) -> list[Demand]:
    """The demands that a choice names; a pattern that names nothing is an error."""
    demands = list(demands)
    if which is None:
        return demands
    if callable(which):
        return [demand for demand in demands if which(demand.name, demand.parameter)]
    patterns = [which] if isinstance(which, str) else list(which)
    names = [demand.name for demand in demands]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise LedgerError(
                f"the pattern {pattern!r} matches none of the {len(names)} parameters.{did_you_mean(pattern, names)}",
                code="C041",
            )
    return [demand for demand in demands if any(fnmatchcase(demand.name, pattern) for pattern in patterns)]


def group_reductions(pairs: Iterable[tuple[Demand, Owed]]) -> list[Reduction]:
    """Reductions with the same mode, ranks and divisor, joined; in the order they first appear."""
    gathered: dict[Owed, list[Demand]] = {}
    for demand, factor in pairs:
        gathered.setdefault(factor, []).append(demand)
    return [_reduction(factor, demands) for factor, demands in gathered.items()]


def _reduction(factor: Owed, demands: list[Demand]) -> Reduction:
    ordered = sorted(demands, key=lambda demand: demand.placement.tie_key)
    return Reduction(
        tuple(demand.name for demand in ordered),
        tuple(demand.parameter for demand in ordered),
        factor.mode,
        factor.ranks,
        factor.divisor,
    )


@dataclass(frozen=True)
class Shards:
    """Which parameters are sharded, and how: the label of each (what must be the same on all ranks), by its id."""

    sharding: Sharding
    labels: Mapping[int, str]
    bucket_mb: float | None = None


Claim = tuple[Any, Sequence[Reduction]]
"""A gradient handler, and the reductions that it does."""


def sums_of(
    claims: Iterable[Claim],
    context: ParallelContext,
    options: Mapping[str, Any],
    unsummed: Iterable[tuple[str, nn.Parameter]] = (),
    shards: Shards | None = None,
) -> list[Sum]:
    """The sums that planned handlers come to on this rank, in the order in which all ranks start them; without groups yet.

    All reductions of a parameter are carried out as one sum over their joint ranks, divided by the product of their divisors.
    `options` hold where a handler was given no others. `unsummed` are parameters that owe nothing and are to lie in buckets
    all the same.
    """
    named: dict[int, tuple[str, nn.Parameter]] = {}
    owed_by: dict[int, list[Reduction]] = {}
    given_for: dict[int, dict[str, tuple[Any, str]]] = {}
    for handler, reductions in claims:
        for reduction in reductions:
            for name, parameter in zip(reduction.names, reduction.parameters, strict=True):
                key = id(parameter)
                named.setdefault(key, (name, parameter))
                owed_by.setdefault(key, []).append(reduction)
                _note_options(given_for.setdefault(key, {}), handler, name)
    for name, parameter in unsummed:
        named.setdefault(id(parameter), (name, parameter))
    members: dict[tuple[tuple[int, ...], float, SyncOptions, bool], list[int]] = {}
    read: dict[Any, SyncOptions] = {}
    for key, (_, parameter) in named.items():
        given = tuple((name, value) for name, (value, _) in given_for.get(key, {}).items())
        sharded = shards is not None and key in shards.labels
        if (given, sharded) not in read:
            chosen = SyncOptions.read({**options, **dict(given)})
            if sharded and shards is not None and shards.bucket_mb is not None:
                chosen = replace(chosen, bucket_mb=shards.bucket_mb)
            read[given, sharded] = chosen
        ranks, divisor = _ranks_and_divisor(parameter, owed_by.get(key, ()), context)
        members.setdefault((ranks, divisor, read[given, sharded], sharded), []).append(key)
    layout = context.layout
    sums = [
        Sum(
            names=tuple(named[key][0] for key in keys),
            parameters=tuple(named[key][1] for key in keys),
            ranks=ranks,
            group=None,
            divisor=divisor,
            options=chosen,
            sharding=shards.sharding if sharded and shards is not None else None,
            labels=tuple(shards.labels[key] for key in keys) if sharded and shards is not None else (),
            between_stages=len({layout.local_rank(ParallelMode.PIPELINE, rank) for rank in ranks}) > 1,
        )
        for (ranks, divisor, chosen, sharded), keys in members.items()
    ]
    return sorted(sums, key=lambda one: one.order)


def with_groups(sums: Iterable[Sum], context: ParallelContext) -> list[Sum]:
    """The sums with their process groups. Collective over the world: groups that do not exist yet are made."""
    sums = list(sums)
    # Every rank asks for its sets at the same moment, whether it has sums or not.
    context.ensure_groups({one.ranks for one in sums if len(one.ranks) > 1})
    return [replace(one, group=context.group_of_ranks(one.ranks)) if len(one.ranks) > 1 else one for one in sums]


def _note_options(noted: dict[str, tuple[Any, str]], handler: Any, parameter: str) -> None:
    """Add the options that a handler was given by name; handlers of one sum must have been given the same."""
    for key, value in handler.options.items():
        before, by = noted.setdefault(key, (value, type(handler).__name__))
        if before != value:
            raise ConfigError(
                f"gradient_handler: {by} has {key}={before!r} and {type(handler).__name__} {key}={value!r}, and both "
                f"sum {parameter!r}, which is one sum; give both the same {key}",
                code="C003",
            )


def _ranks_and_divisor(
    parameter: nn.Parameter, reductions: Sequence[Reduction], context: ParallelContext
) -> tuple[tuple[int, ...], float]:
    layout, rank = context.layout, context.get_global_rank()
    divisor = prod((reduction.divisor for reduction in reductions), start=1.0)
    if not reductions:
        return (rank,), divisor
    if len(reductions) == 1:
        # Those that the handler names, which the ledger has compared with what is owed (or did not, where it is waived).
        return reductions[0].ranks, divisor
    factors = tuple(Owed(each.mode, each.ranks, int(each.divisor)) for each in reductions)
    return joint_ranks(layout, effective_placement(parameter, layout, rank), factors, rank), divisor

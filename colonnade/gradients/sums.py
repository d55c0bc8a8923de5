"""From the plans of handlers to sums: one for each parameter, over all the modes it owes something to at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
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

# --------------------------------------------------------------------------------------------------
# Reductions as plain data: what each parameter owes, what a handler plans, and the sums that are carried out.
# --------------------------------------------------------------------------------------------------


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


@dataclass(frozen=True)
class SumPlan:
    """What one handler wants summed, and the options that were given for it by name."""

    handler: str
    reductions: list[Reduction]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class _Entry:
    name: str
    parameter: nn.Parameter
    reductions: list[Reduction]
    options: dict[str, tuple[Any, str]]


Grouped = dict[tuple[tuple[int, ...], float, SyncOptions, bool], list[_Entry]]
"""Parameters by (ranks, divisor, options, whether they are sharded)."""


def group_plans(
    plans: Iterable[SumPlan],
    context: ParallelContext,
    options: Mapping[str, Any],
    unsummed: Iterable[tuple[str, nn.Parameter]] = (),
    shards: Shards | None = None,
) -> Grouped:
    """What these plans come to, as this rank sees it.

    `options` hold where a handler was given no others. `unsummed` are parameters that owe nothing and are to lie in
    buckets all the same.
    """
    entries = _by_parameter(plans, unsummed)
    grouped: Grouped = {}
    read: dict[Any, SyncOptions] = {}
    for entry in entries:
        given = tuple((key, value) for key, (value, _) in entry.options.items())
        sharded = shards is not None and id(entry.parameter) in shards.labels
        if (given, sharded) not in read:
            chosen = SyncOptions.read({**options, **dict(given)})
            if sharded and shards is not None and shards.bucket_mb is not None:
                chosen = replace(chosen, bucket_mb=shards.bucket_mb)
            read[given, sharded] = chosen
        grouped.setdefault((*_ranks_and_divisor(entry, context), read[given, sharded], sharded), []).append(entry)
    return grouped


def make_sums(grouped: Grouped, context: ParallelContext, shards: Shards | None = None) -> list[Sum]:
    """The sums, with their groups. Collective over the world: groups that do not exist yet are made."""
    # Every rank asks for its sets at the same moment, whether it has sums or not.
    several = {ranks for ranks, *_ in grouped if len(ranks) > 1}
    context.ensure_groups(several)
    return [
        Sum(
            names=tuple(entry.name for entry in members),
            parameters=tuple(entry.parameter for entry in members),
            ranks=ranks,
            group=context.group_of_ranks(ranks) if ranks in several else None,
            divisor=divisor,
            options=chosen,
            sharding=shards.sharding if sharded and shards is not None else None,
            labels=tuple(shards.labels[id(entry.parameter)] for entry in members) if sharded and shards else (),
            between_stages=len({context.layout.local_rank(ParallelMode.PIPELINE, rank) for rank in ranks}) > 1,
        )
        for (ranks, divisor, chosen, sharded), members in grouped.items()
    ]


def _by_parameter(plans: Iterable[SumPlan], unsummed: Iterable[tuple[str, nn.Parameter]]) -> list[_Entry]:
    entries: dict[int, _Entry] = {}
    for plan in plans:
        for reduction in plan.reductions:
            for name, parameter in zip(reduction.names, reduction.parameters, strict=True):
                entry = entries.setdefault(id(parameter), _Entry(name, parameter, [], {}))
                entry.reductions.append(reduction)
                for key, value in plan.options.items():
                    before, by = entry.options.setdefault(key, (value, plan.handler))
                    if before != value:
                        raise ConfigError(
                            f"gradient_handler: {by} has {key}={before!r} and {plan.handler} {key}={value!r}, and both "
                            f"sum {name!r}, which is one sum; give both the same {key}",
                            code="C003",
                        )
    for name, parameter in unsummed:
        entries.setdefault(id(parameter), _Entry(name, parameter, [], {}))
    return list(entries.values())


def _ranks_and_divisor(entry: _Entry, context: ParallelContext) -> tuple[tuple[int, ...], float]:
    layout, rank = context.layout, context.get_global_rank()
    divisor = 1.0
    for reduction in entry.reductions:
        divisor *= reduction.divisor
    if not entry.reductions:
        return (rank,), divisor
    if len(entry.reductions) == 1:
        (only,) = entry.reductions
        return only.ranks, divisor
    placement = effective_placement(entry.parameter, layout, rank)
    factors = tuple(Owed(r.mode, r.ranks, int(r.divisor)) for r in entry.reductions)
    return joint_ranks(layout, placement, factors, rank), divisor

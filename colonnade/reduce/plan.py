"""From the plans of handlers to sums: one for each parameter, over all the modes it owes something to at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import ConfigError
from colonnade.parallel.demand import Owed, joint_ranks
from colonnade.parallel.dtensor import effective_placement
from colonnade.reduce.options import SyncOptions
from colonnade.reduce.records import Reduction, Sharding, Sum


@dataclass(frozen=True)
class Shards:
    """Which parameters are sharded, and how: the label of each (what must be the same on all ranks), by its id."""

    sharding: Sharding
    labels: Mapping[int, str]
    bucket_mb: float | None = None


@dataclass(frozen=True)
class Plan:
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
    plans: Iterable[Plan],
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


def _by_parameter(plans: Iterable[Plan], unsummed: Iterable[tuple[str, nn.Parameter]]) -> list[_Entry]:
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

"""Reductions as plain data: what each parameter owes, what a handler plans, and the sums that are carried out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.distributed import ProcessGroup

from colonnade.context.layout import Layout
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import LedgerError, did_you_mean
from colonnade.parallel.demand import Owed, owed
from colonnade.parallel.dtensor import effective_placement
from colonnade.parallel.placement import Placement
from colonnade.reduce.options import SyncOptions

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

"""Reductions as plain data: what is owed by whom, what a handler does, and how several become one sum."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from colonnade.context.layout import Layout
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import LedgerError, did_you_mean
from colonnade.parallel.demand import Owed, owed
from colonnade.parallel.dtensor import effective_placement
from colonnade.parallel.placement import Placement

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


def read_demands(model: nn.Module, layout: Layout, rank: int) -> list[Demand]:
    """What every parameter of the model owes; a parameter with two names counts once, under its first."""
    known: dict[Placement, tuple[Owed, ...]] = {}
    demands = []
    for name, parameter in model.named_parameters():
        placement = effective_placement(parameter, layout, rank)
        if placement not in known:
            known[placement] = owed(layout, placement, rank)
        demands.append(Demand(name, parameter, placement, known[placement]))
    return demands


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
                f"the pattern {pattern!r} matches none of the {len(names)} parameters.{did_you_mean(pattern, names)}"
            )
    return [demand for demand in demands if any(fnmatchcase(demand.name, pattern) for pattern in patterns)]


def group_reductions(pairs: Iterable[tuple[Demand, Owed]]) -> list[Reduction]:
    """Reductions with the same mode, ranks and divisor, joined; in the order they first appear."""
    gathered: dict[Owed, list[Demand]] = {}
    for demand, factor in pairs:
        gathered.setdefault(factor, []).append(demand)
    return [_reduction(factor, demands) for factor, demands in gathered.items()]


def _reduction(factor: Owed, demands: list[Demand]) -> Reduction:
    ordered = sorted(demands, key=_tie_key)
    return Reduction(
        tuple(demand.name for demand in ordered),
        tuple(demand.parameter for demand in ordered),
        factor.mode,
        factor.ranks,
        factor.divisor,
    )


def _tie_key(demand: Demand) -> Any:
    # Tied parameters have other names and places at each stage; their key is what all stages agree on.
    # sorted() is stable, so the untied ones keep the model's order.
    tied = demand.placement.tied
    return tied.key if tied is not None else ""

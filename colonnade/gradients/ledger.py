"""The ledger: parameter x mode, what reduction the placements demand, and which handler does it.

A reduction that nobody does, that two do, or that is done over other ranks or with another divisor is an
error before step 1. It names the parameters, the mode and the handler.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import combinations
from math import isclose, prod
from typing import NamedTuple

from colonnade.context.layout import Layout
from colonnade.errors import LedgerError, did_you_mean
from colonnade.gradients.sums import Demand, Reduction
from colonnade.parallel.demand import Owed, joint_ranks
from colonnade.texts import pattern_of

Covered = tuple[str, Reduction]
"""(name of the handler, what it does)"""


class LedgerRow(NamedTuple):
    """One sum that one parameter owes. Of one that is `waived`, what the handler does (`done_by`) was not checked."""

    parameter: str
    mode: str
    ranks: tuple[int, ...]
    divisor: float
    done_by: str | None
    waived: bool = False

    @property
    def who(self) -> str:
        """Who does it, in words."""
        if self.waived:
            return f"{self.done_by} (waived)" if self.done_by else "waived"
        return self.done_by or "NOBODY"


@dataclass(frozen=True)
class LedgerPattern:
    """A sum that `count` parameters owe alike; numbers in their names are stars."""

    pattern: str
    count: int
    mode: str
    ranks: tuple[int, ...]
    divisor: float
    done_by: str


class Ledger:
    """The rows, for people (`print`) and for programs (`to_json`)."""

    def __init__(self, rows: Sequence[LedgerRow]) -> None:
        self.rows = tuple(rows)

    def open_rows(self) -> list[LedgerRow]:
        """What is owed and done by nobody."""
        return [row for row in self.rows if row.done_by is None and not row.waived]

    def filled(self, done: Mapping[tuple[str, str], str]) -> Ledger:
        """With open rows done: (parameter, mode) -> the name of a handler."""
        found = [row.done_by or done.get((row.parameter, row.mode)) for row in self.rows]
        return Ledger([row._replace(done_by=who) for row, who in zip(self.rows, found, strict=True)])

    def by_pattern(self) -> list[LedgerPattern]:
        """The rows, those of parameters that are alike as one."""
        counts: Counter[tuple[str, str, tuple[int, ...], float, str]] = Counter()
        for row in self.rows:
            key = (pattern_of(row.parameter), row.mode, row.ranks, row.divisor, row.who)
            counts[key] += 1
        return [
            LedgerPattern(pattern, count, mode, ranks, divisor, who)
            for (pattern, mode, ranks, divisor, who), count in counts.items()
        ]

    def to_json(self) -> str:
        """All rows as a JSON list."""
        return json.dumps([row._asdict() for row in self.rows], indent=1)

    def __str__(self) -> str:
        if not self.rows:
            return "ledger: no gradient owes a reduction on this rank"
        lines = [("parameters", "n", "over", "ranks", "divided by", "done by")]
        for row in self.by_pattern():
            count, divisor = str(row.count), f"{row.divisor:g}"
            lines.append((row.pattern, count, row.mode, _short(row.ranks), divisor, row.done_by))
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines
        )


def match(
    demands: Sequence[Demand],
    covered: Iterable[Covered],
    layout: Layout,
    rank: int,
    waive: Sequence[str] = (),
    touched: Mapping[str, str] | None = None,
) -> Ledger:
    """Write every handler's reductions into the ledger; wrong or doubled ones are one error that lists them all.

    Those of waived parameters are written in unchecked; `touched`: who else changes the gradients of such.
    """
    _check_patterns(demands, waive)
    done: dict[tuple[str, Owed], str] = {}
    problems: list[str] = []
    by_parameter = {id(demand.parameter): demand for demand in demands}
    for handler, reduction in covered:
        for name, parameter in zip(reduction.names, reduction.parameters, strict=True):
            demand = by_parameter.get(id(parameter))
            if demand is None:
                continue
            if is_waived(name, waive):
                meant = _matching(demand, reduction, layout, rank) or demand.owed
                done.update(
                    {(name, factor): handler for factor in meant if factor.mode is reduction.mode or len(meant) == 1}
                )
                continue
            problems += _enter(demand, handler, reduction, layout, rank, done)
    if problems:
        raise LedgerError(_report(problems), code="C041")
    return Ledger(
        [
            LedgerRow(
                demand.name,
                factor.mode.name,
                factor.ranks,
                factor.divisor,
                done.get((demand.name, factor), (touched or {}).get(demand.name)),
                is_waived(demand.name, waive),
            )
            for demand in demands
            for factor in demand.owed
        ]
    )


def require_complete(ledger: Ledger) -> None:
    """Refuse to train while something is owed and done by nobody."""
    problems = [
        f"{row.parameter}: a sum over {row.mode} {list(row.ranks)} is owed and no handler does it"
        for row in ledger.open_rows()
    ]
    if problems:
        raise LedgerError(_report(problems), code="C040")


def _enter(
    demand: Demand,
    handler: str,
    reduction: Reduction,
    layout: Layout,
    rank: int,
    done: dict[tuple[str, Owed], str],
) -> list[str]:
    """Mark the rows that this reduction covers; returns what is wrong with it."""
    factors = _matching(demand, reduction, layout, rank)
    over = reduction.mode.name if factors is None else " and ".join(factor.mode.name for factor in factors)
    what = f"{demand.name}: {handler} sums over {over} {list(reduction.ranks)}"
    if factors is None:
        owes = "; ".join(f"{f.mode.name} {list(f.ranks)} / {f.divisor:g}" for f in demand.owed) or "nothing"
        return [f"{what}, but its placement ({demand.placement}) owes {owes}"]
    if all(done.get((demand.name, factor)) == handler for factor in factors):
        return [f"{demand.name}: {handler} sums twice over {over} {list(reduction.ranks)}"]
    divisor = prod(factor.divisor for factor in factors)
    if not isclose(reduction.divisor, divisor):
        missing = [factor for factor in demand.owed if factor not in factors]
        if missing and isclose(reduction.divisor, prod(factor.divisor for factor in demand.owed)):
            left = " and ".join(f"{factor.mode.name} {list(factor.ranks)}" for factor in missing)
            return [
                f"{what} and divides by {reduction.divisor:g}, the divisor of all that is owed, but does not sum over {left}"
            ]
        return [f"{what} and divides by {reduction.divisor:g}, but {divisor} ranks saw distinct data"]
    problems = []
    for factor in factors:
        before = done.get((demand.name, factor))
        if before is not None:
            problems.append(f"{what}, which {before} does already")
        done[demand.name, factor] = handler
    return problems


def _matching(demand: Demand, reduction: Reduction, layout: Layout, rank: int) -> tuple[Owed, ...] | None:
    """The owed factors that together are a sum over just these ranks; one factor of the mode itself first."""
    for factor in demand.owed:
        if factor.mode is reduction.mode and factor.ranks == reduction.ranks:
            return (factor,)
    for count, _ in enumerate(demand.owed, 1):
        for factors in combinations(demand.owed, count):
            if joint_ranks(layout, demand.placement, factors, rank) == reduction.ranks:
                return factors
    return None


def _report(problems: list[str]) -> str:
    shown = "\n  ".join(_by_kind(problems)[:12])
    more = f"\n  ... and {len(problems) - 12} more" if len(problems) > 12 else ""
    return (
        f"the gradients would not be those of one process:\n  {shown}{more}\n"
        f"Correct the handler or the placement, or name parameters in sync=dict(waive=[...]) if you know better."
    )


def _by_kind(problems: list[str]) -> list[str]:
    """One line for parameters whose problem is the same but for the numbers in their name."""
    kinds: dict[str, list[str]] = {}
    for problem in problems:
        kinds.setdefault(pattern_of(problem, inside=True), []).append(problem)
    return [first + (f" (and {len(alike)} alike)" if alike else "") for first, *alike in kinds.values()]


def _short(ranks: tuple[int, ...]) -> str:
    return str(list(ranks)) if len(ranks) <= 8 else f"[{ranks[0]}, {ranks[1]}, ... {ranks[-1]}] ({len(ranks)})"


def is_waived(name: str, waive: Sequence[str]) -> bool:
    """Whether the user took this parameter out of the check."""
    return any(fnmatchcase(name, pattern) for pattern in waive)


def _check_patterns(demands: Sequence[Demand], waive: Sequence[str]) -> None:
    names = [demand.name for demand in demands]
    for pattern in waive:
        if not any(fnmatchcase(name, pattern) for name in names):
            # A pattern may be meant for another pipeline stage; only a pattern close to a name here is a slip.
            hint = did_you_mean(pattern, names)
            if hint and "*" not in pattern:
                raise LedgerError(f"sync.waive: {pattern!r} matches no parameter.{hint}", code="C041")

"""The ledger: a table of every required gradient reduction (parameter x mode) and the handler that performs it.

A reduction without a handler, with two handlers, with wrong ranks or with a wrong divisor is an error before step 1. The
message names the parameters, the mode and the handler.
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


class LedgerRow(NamedTuple):
    """A required reduction of one parameter, and the handler `done_by` that performs it.

    With `waived`, the reduction was not checked.
    """

    parameter: str
    mode: str
    ranks: tuple[int, ...]
    divisor: float
    done_by: str | None
    waived: bool = False

    @property
    def who(self) -> str:
        """The name of the handler as text for the table; "NOBODY" if the row has no handler."""
        if self.waived:
            return f"{self.done_by} (waived)" if self.done_by else "waived"
        return self.done_by or "NOBODY"


@dataclass(frozen=True)
class LedgerPattern:
    """A row for `count` parameters with the same reduction, whose names match `pattern` (a star in place of each number)."""

    pattern: str
    count: int
    mode: str
    ranks: tuple[int, ...]
    divisor: float
    done_by: str


class Ledger:
    """The rows of the ledger. `print(ledger)` shows a table of patterns, `to_json` returns all rows."""

    def __init__(self, rows: Sequence[LedgerRow]) -> None:
        self.rows = tuple(rows)

    def open_rows(self) -> list[LedgerRow]:
        """The required reductions without a handler."""
        return [row for row in self.rows if row.done_by is None and not row.waived]

    def filled(self, done_by: Mapping[tuple[str, str], str]) -> Ledger:
        """A copy of the ledger whose open rows have handlers; `done_by` maps (parameter, mode) to the name of a handler."""
        return Ledger(
            [row._replace(done_by=row.done_by or done_by.get((row.parameter, row.mode))) for row in self.rows]
        )

    def by_pattern(self) -> list[LedgerPattern]:
        """The rows, merged: one row for all parameters whose names differ only in numbers."""
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
            return "ledger: no gradient needs a reduction on this rank"
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
    covered: Iterable[tuple[str, Reduction]],
    layout: Layout,
    rank: int,
    waive: Sequence[str] = (),
    touched: Mapping[str, str] | None = None,
) -> Ledger:
    """Build the ledger: match the reductions of all handlers with the required reductions.

    Args:
        demands: The parameters and their required reductions.
        covered: (name of the handler, reduction) for each reduction that a handler performs.
        layout: The parallel layout.
        rank: This rank.
        waive: Name patterns of parameters whose reductions are entered without a check.
        touched: {name of a waived parameter: name of a handler that changes its gradient, but not by a reduction}.

    Raises:
        LedgerError: A reduction is wrong or performed twice; one error lists all.
    """
    names = [demand.name for demand in demands]
    for pattern in waive:
        if not any(fnmatchcase(name, pattern) for name in names):
            # A pattern may be meant for another pipeline stage; only a pattern close to a name here is surely a typo.
            hint = did_you_mean(pattern, names)
            if hint and "*" not in pattern:
                raise LedgerError(f"sync.waive: {pattern!r} matches no parameter.{hint}", code="C041")

    done: dict[tuple[str, Owed], str] = {}
    problems: list[str] = []
    by_parameter = {id(demand.parameter): demand for demand in demands}
    for handler, reduction in covered:
        for name, parameter in zip(reduction.names, reduction.parameters, strict=True):
            demand = by_parameter.get(id(parameter))
            if demand is None:
                continue
            if is_waived(name, waive):
                factors = _matching(demand, reduction, layout, rank) or demand.owed
                done.update(
                    {
                        (name, factor): handler
                        for factor in factors
                        if factor.mode is reduction.mode or len(factors) == 1
                    }
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
    """Raise LedgerError if a required reduction has no handler."""
    problems = [
        f"{row.parameter}: needs an all-reduce over {row.mode} {list(row.ranks)}, but no handler performs it"
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
    """Mark the rows that this reduction covers; returns the problems with it."""
    factors = _matching(demand, reduction, layout, rank)
    over = reduction.mode.name if factors is None else " and ".join(factor.mode.name for factor in factors)
    what = f"{demand.name}: {handler} sums over {over} {list(reduction.ranks)}"
    if factors is None:
        required = "; ".join(f"{f.mode.name} {list(f.ranks)} / {f.divisor:g}" for f in demand.owed) or "no reduction"
        return [f"{what}, but its placement ({demand.placement}) requires {required}"]
    if all(done.get((demand.name, factor)) == handler for factor in factors):
        return [f"{demand.name}: {handler} sums twice over {over} {list(reduction.ranks)}"]
    divisor = prod(factor.divisor for factor in factors)
    if not isclose(reduction.divisor, divisor):
        # The most common mistake has its own message: the divisor of all reductions together, but only some of the sums.
        missing = [factor for factor in demand.owed if factor not in factors]
        if missing and isclose(reduction.divisor, prod(factor.divisor for factor in demand.owed)):
            unsummed = " and ".join(f"{factor.mode.name} {list(factor.ranks)}" for factor in missing)
            return [
                f"{what} and divides by {reduction.divisor:g}, the divisor of all required reductions, but does not sum over {unsummed}"
            ]
        return [f"{what} and divides by {reduction.divisor:g}, but {divisor} ranks saw distinct data"]
    problems = []
    for factor in factors:
        before = done.get((demand.name, factor))
        if before is not None:
            problems.append(f"{what}, but {before} does so, too")
        done[demand.name, factor] = handler
    return problems


def _matching(demand: Demand, reduction: Reduction, layout: Layout, rank: int) -> tuple[Owed, ...] | None:
    """The required factors whose joint sum is over exactly these ranks.

    If several match, a factor of the same mode is preferred.
    """
    for factor in demand.owed:
        if factor.mode is reduction.mode and factor.ranks == reduction.ranks:
            return (factor,)
    for count, _ in enumerate(demand.owed, 1):
        for factors in combinations(demand.owed, count):
            if joint_ranks(layout, demand.placement, factors, rank) == reduction.ranks:
                return factors
    return None


def _report(problems: list[str]) -> str:
    # One line for parameters whose problems differ only by the numbers in their names.
    kinds: dict[str, list[str]] = {}
    for problem in problems:
        kinds.setdefault(pattern_of(problem, inside=True), []).append(problem)
    lines = [first + (f" (and {len(alike)} alike)" if alike else "") for first, *alike in kinds.values()]
    shown = "\n  ".join(lines[:12])
    more = f"\n  ... and {len(problems) - 12} more" if len(problems) > 12 else ""
    return (
        f"gradient reductions are inconsistent:\n  {shown}{more}\n"
        f"Correct the handler or the placement, or exempt parameters from this check with sync=dict(waive=[...])."
    )


def _short(ranks: tuple[int, ...]) -> str:
    return str(list(ranks)) if len(ranks) <= 8 else f"[{ranks[0]}, {ranks[1]}, ... {ranks[-1]}] ({len(ranks)})"


def is_waived(name: str, waive: Sequence[str]) -> bool:
    """Whether the config exempts this parameter from the ledger check."""
    return any(fnmatchcase(name, pattern) for pattern in waive)

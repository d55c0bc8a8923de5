"""What a comparison says: a table, sentences, JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite

_SHOWN = 40
"""Rows of a printed table that differ; the rest is counted. JSON has all of them."""


@dataclass(frozen=True)
class Row:
    """One compared thing: a parameter's gradient in a step, say. `error` is the worst, in units of the tolerance."""

    quantity: str
    name: str
    step: int | None
    status: str
    error: float
    tolerance: float
    ranks: tuple[int, ...] = ()
    """The ranks on which it differs from one process."""
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Whether it is equal to one process."""
        return self.status == "equal"


@dataclass(frozen=True)
class Finding:
    """One mistake: its name (a key of `CAUSES`), what it touches, and a sentence that says what and where to look."""

    cause: str
    parameters: tuple[str, ...]
    step: int | None
    sentence: str
    factor: float | None = None


@dataclass(frozen=True)
class Report:
    """Whether a parallel run equals one process, and if not, why. `print` it, or read it as JSON."""

    findings: Sequence[Finding] = ()
    rows: Sequence[Row] = ()
    notes: Sequence[str] = field(default=())

    @property
    def ok(self) -> bool:
        """Whether everything that was compared is equal within its tolerance."""
        return not self.findings and all(row.ok for row in self.rows)

    @property
    def causes(self) -> list[str]:
        """The keys of the findings, first things first."""
        return [finding.cause for finding in self.findings]

    def to_json(self) -> str:
        """Everything, as one JSON object. Numbers that JSON has no word for are strings."""
        whole = {
            "ok": self.ok,
            "findings": [asdict(finding) for finding in self.findings],
            "rows": [asdict(row) for row in self.rows],
            "notes": list(self.notes),
        }
        return json.dumps(_plain(whole), indent=1)

    def __str__(self) -> str:
        verdict = "equal to one process" if self.ok else "NOT equal to one process"
        parts = [verdict, *_sentences(self.findings), "", _table(self.rows)]
        return "\n".join([*parts, *(f"note: {note}" for note in self.notes)])


def _sentences(findings: Sequence[Finding]) -> Iterable[str]:
    for at, finding in enumerate(findings, 1):
        step = "" if finding.step is None else f" (step {finding.step})"
        yield f"{at}. {finding.cause}{step}: {finding.sentence}"


def _table(rows: Sequence[Row]) -> str:
    """What differs, worst first; what is equal in one line for each quantity and step."""
    wrong = sorted((row for row in rows if not row.ok), key=lambda row: (row.step or 0, -row.error))
    lines: list[tuple[str, ...]] = [("compared", "step", "name", "status", "error / tolerance", "ranks")]
    lines += [_line(row) for row in wrong[:_SHOWN]]
    if len(wrong) > _SHOWN:
        lines.append(("", "", f"... and {len(wrong) - _SHOWN} more that differ", "", "", ""))
    lines += _folded([row for row in rows if row.ok])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _line(row: Row) -> tuple[str, ...]:
    status = f"{row.status} ({row.detail})" if row.detail else row.status
    return row.quantity, _step(row.step), row.name, status, f"{row.error:.3g}", short_ranks(row.ranks)


def _folded(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    alike: dict[tuple[str, int | None], list[Row]] = {}
    for row in rows:
        alike.setdefault((row.quantity, row.step), []).append(row)
    return [
        (
            quantity,
            _step(step),
            some[0].name if len(some) == 1 else f"{len(some)} of them",
            "equal",
            f"{max(row.error for row in some):.3g}",
            "",
        )
        for (quantity, step), some in alike.items()
    ]


def short_ranks(ranks: Sequence[int]) -> str:
    """Ranks as text; the first and the last of many."""
    ranks = list(ranks)
    if not ranks:
        return ""
    return str(ranks) if len(ranks) <= 8 else f"[{ranks[0]}, {ranks[1]}, ... {ranks[-1]}] ({len(ranks)})"


def _step(step: int | None) -> str:
    return "" if step is None else str(step)


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value

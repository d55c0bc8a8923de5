"""Facts: what a rank saw, beside what it must be. Ranks only report; the test judges, so no rank is left waiting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

ALIKE = "the same on every rank"


@dataclass(frozen=True)
class Fact:
    """`found` must be `wanted`: equal, within `rtol` of it, at most it, or (ALIKE) equal on all ranks."""

    what: str
    found: Any
    wanted: Any
    rtol: float = 0.0
    at_most: bool = False

    @property
    def holds(self) -> bool:
        """Whether this rank saw what it should."""
        if self.wanted == ALIKE:
            return True
        if self.at_most:
            return bool(self.found <= self.wanted)
        if self.rtol:
            return math.isclose(self.found, self.wanted, rel_tol=self.rtol, abs_tol=0.0)
        return repr(self.found) == repr(self.wanted)  # NaN is NaN

    def __str__(self) -> str:
        how = "at most " if self.at_most else f"(to {self.rtol:g}) " if self.rtol else ""
        return f"{self.what}: {self.found!r}, not {how}{self.wanted!r}"


def judge(by_rank: Sequence[Sequence[Fact]]) -> None:
    """Every fact of every rank holds, and all ranks report the same list."""
    assert {len(facts) for facts in by_rank} == {len(by_rank[0])}, "ranks report different numbers of facts"
    assert by_rank[0], "nothing was checked"
    wrong = [f"rank {rank}: {fact}" for rank, facts in enumerate(by_rank) for fact in facts if not fact.holds]
    for facts in zip(*by_rank, strict=True):
        if facts[0].wanted == ALIKE and len({repr(fact.found) for fact in facts}) > 1:
            wrong.append(f"ranks differ in {facts[0].what}: {[fact.found for fact in facts]}")
    assert not wrong, "\n".join(wrong[:40])

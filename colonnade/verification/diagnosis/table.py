"""The table of hypotheses. One of your own: `@hypothesis("gradient")` on a function of a case that yields claims."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar


@dataclass(frozen=True)
class Claim:
    """A mistake that explains the numbers of one case. `what` goes on after the name of the thing that is wrong;
    `where` says where to look; `modes` picks the ledger's line; `residual` is what is left, in units of the tolerance."""

    cause: str
    what: str
    where: str
    factor: float | None = None
    modes: tuple[str, ...] = ()
    residual: float = 0.0
    rank: int = 0
    """Lower wins among claims that explain as many parameters: the simpler and more usual mistake. 0: its place in the table."""
    doubt: int = 0
    """What else speaks against it: healthy parameters that would share the mistake. Counts after `rank`."""

    @property
    def key(self) -> tuple[str, str]:
        """Claims of several parameters with one key are one finding."""
        return self.cause, self.what


Hypothesis = Callable[[Any], Iterable[Claim]]
HYPOTHESES: dict[str, list[Hypothesis]] = {}
"""By what they explain: "gradient", "norm", "clipped", "tensor" (weights, activations and buffers), "weights" and "activation"."""

_F = TypeVar("_F", bound=Hypothesis)


def hypothesis(kind: str) -> Callable[[_F], _F]:
    """Enter a function into the table; earlier ones win where two explain the same."""

    def enter(function: _F) -> _F:
        HYPOTHESES.setdefault(kind, []).append(function)
        return function

    return enter


def claims(kind: str, case: Any) -> list[Claim]:
    """What the hypotheses of this kind say of a case: those whose residual is within the tolerance, and near the best."""
    found = [
        Claim(**{**vars(claim), "rank": claim.rank or at})
        for at, function in enumerate(HYPOTHESES.get(kind, ()), 1)
        for claim in function(case)
        if claim.residual <= 1
    ]
    best = min((claim.residual for claim in found), default=0.0)
    return [claim for claim in found if claim.residual <= max(0.3, 3 * best)]

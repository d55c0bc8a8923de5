"""Right gradients and wrong weights: what the optimizer did instead."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from colonnade.verification.comparing.compare import at_positions, flat
from colonnade.verification.comparing.evidence import Part
from colonnade.verification.comparing.tolerance import length
from colonnade.verification.diagnosis.case import Case
from colonnade.verification.diagnosis.factors import near
from colonnade.verification.diagnosis.table import Claim, hypothesis


@hypothesis("weights")
def another_step_size(case: Case) -> Iterator[Claim]:
    """The weight moved in the right direction by another length."""
    old = case.before
    if old is None or case.compared.truth.numel() < 2:
        return
    before = old

    def start(part: Part) -> Tensor:
        return at_positions(before, part.positions)

    above, below = 0.0, 0.0
    for part in case.wrong:
        truth = case.truth(part)
        if truth is None:
            return
        moved = truth - start(part)
        above += float((flat(part.value) - start(part)) @ moved)
        below += float(moved @ moved)
    if below == 0:
        return
    factor = above / below

    def candidate(part: Part) -> Tensor | None:
        truth = case.truth(part)
        return None if truth is None else start(part) + factor * (truth - start(part))

    names = near(factor, case.sizes, max(1e-9, 2 * case.row.tolerance / below**0.5))
    what = f"moved {factor:.6g} times as far as it should" + (f" ({' or '.join(map(str, names))})" if names else "")
    if length(flat(case.compared.truth) - flat(before)) > 10 * case.row.tolerance:
        where = "the learning rate of its group, and what else scales the step"
        yield Claim("optimizer-differs", what, where, factor, residual=case.residual(candidate))

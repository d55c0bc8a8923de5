"""Right numbers that were rounded to a narrower dtype than that of the run."""

from __future__ import annotations

from collections.abc import Iterator
from math import log

import torch
from torch import Tensor

from colonnade.proof.case import Case, NormCase, digits, either, near
from colonnade.proof.claims import Claim, hypothesis
from colonnade.proof.compare import WEIGHTS, LocalValue, at_positions, flat, length

_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_WHERE = "casts on the way, and the dtype of the reduction"
_USUAL, _SPREAD = 0.2, 8.0
"""Rounding moves a number by 0.2 of the dtype's eps on average; later operations make that up to 8 times more or less."""
_RANK = 70
"""The rank of these claims: after every claim that explains more."""


def narrower(value: Tensor, truth: Tensor, dtype: str, exactly: bool = False) -> str | None:
    """Return the dtype, narrower than that of the run, whose rounding explains the difference; None if there is none.

    A dtype explains it if every element is representable in the dtype. Unless `exactly`, it is enough that no element
    differs by more than the dtype's rounding error: sums of rounded numbers need not be representable.
    """
    size, off, own = length(truth), (value - truth).abs().max(), torch.finfo(getattr(torch, dtype)).eps
    narrow = {
        str(dtype).removeprefix("torch."): torch.finfo(dtype).eps
        for dtype in _NARROW
        if torch.finfo(dtype).eps > 4 * own
    }
    for name, eps in reversed(narrow.items()):  # a bfloat16 number is a float32 number too
        # Where the true numbers are numbers of that dtype as well, being one says nothing.
        if length(truth.to(getattr(torch, name)).double() - truth) <= 1e-3 * eps * size:
            continue
        fits = length(value.to(getattr(torch, name)).double() - value) <= 1e-3 * eps * length(value)
        if fits and length(value - truth) <= 8 * eps * size:
            return name
    near = [name for name, eps in narrow.items() if name != "bfloat16" and off <= eps * truth.abs().max()]
    return None if exactly or not near else near[0]


@hypothesis("gradient")
@hypothesis("tensor")
def rounded(case: Case) -> Iterator[Claim]:
    """Mistake: values are cast to a narrower dtype.

    Signature: the difference from the truth is the rounding error of that dtype.
    """
    found, some_are_right = set(), len(case.wrong) < len(case.compared.found)
    exactly = some_are_right or case.row.quantity == WEIGHTS  # weights are not summed after they are written
    for part in case.wrong:
        truth = case.truth(part)
        if truth is None:
            return
        found.add(narrower(flat(part.value), truth, case.evidence.dtype, exactly))
    if len(found) == 1 and (dtype := found.pop()):
        yield Claim("rounded", f"is rounded to {dtype}", _WHERE, residual=0.5, rank=_RANK)


@hypothesis("activation")
def rounded_before(case: Case) -> Iterator[Claim]:
    """Mistake: a cast to a narrower dtype somewhere upstream, on some ranks only (autocast, for example).

    Signature: on these ranks the errors have random signs and the size of that dtype's rounding.
    """
    own = torch.finfo(getattr(torch, case.evidence.dtype)).eps
    narrow = [dtype for dtype in _NARROW if torch.finfo(dtype).eps > 4 * own]
    pairs = [
        (flat(part.value), truth) for part in case.wrong if (truth := case.truth(part)) is not None and truth.any()
    ]
    if not narrow or not pairs or len(pairs) == len(case.compared.found) or len(pairs) < len(case.wrong):
        return
    value, truth = (torch.cat(column) for column in zip(*pairs, strict=True))
    off = length(value - truth) / length(truth)
    if abs(float(value @ truth) / float(truth @ truth) - 1) > off / 2:
        return  # the errors have one direction, so they are not rounding
    ratios = {dtype: off / (_USUAL * torch.finfo(dtype).eps) for dtype in narrow}
    dtype = min(narrow, key=lambda dtype: abs(log(ratios[dtype])))
    if abs(log(ratios[dtype])) < log(_SPREAD):
        name = str(dtype).removeprefix("torch.")
        what = f"is off by {off:.2g} of its length, as much as rounding to {name} upstream of it causes"
        yield Claim("rounded", what, "casts and autocast that only these ranks have", residual=0.5, rank=_RANK)


@hypothesis("norm")
def rounded_norm(case: NormCase) -> Iterator[Claim]:
    """Mistake: the norm is cast to a narrower dtype.

    Signature: the difference from the true norm is the rounding error of that dtype.
    """
    values = torch.tensor(list(case.found.values()), dtype=torch.float64)
    if dtype := narrower(values, torch.full_like(values, case.truth), case.evidence.dtype):
        yield Claim("rounded", f"is rounded to {dtype}", _WHERE, residual=0.2, rank=_RANK)


# --- Right gradients and wrong weights: the step of the optimizer ---


@hypothesis("weights")
def another_step_size(case: Case) -> Iterator[Claim]:
    """Mistake: a wrong learning rate, or another factor that scales the step.

    Signature: the weight moved in the right direction, but by a wrong distance.
    """
    old = case.before
    if old is None or case.compared.truth.numel() < 2:
        return
    before = old

    def start(part: LocalValue) -> Tensor:
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
    factor, within = above / below, max(1e-9, 2 * case.row.tolerance / below**0.5)
    if abs(factor) <= within:
        return  # not updated at all: `as_before`

    def candidate(part: LocalValue) -> Tensor | None:
        truth = case.truth(part)
        return None if truth is None else start(part) + factor * (truth - start(part))

    names = near(factor, case.sizes, within)
    what = f"was updated by {digits(factor)} times the correct step{either(names)}"
    if length(flat(case.compared.truth) - flat(before)) > 10 * case.row.tolerance:
        where = "the learning rate of its parameter group, and anything else that scales the step"
        yield Claim("optimizer-differs", what, where, factor, residual=case.residual(candidate))

"""What was done to each rank's own gradient before the sum: clipped, rounded, thinned out, held back, or replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, product

import torch
from torch import Tensor

from colonnade.proof.case import Candidate, GradientCase, sum_of_passes
from colonnade.proof.claims import Claim, hypothesis
from colonnade.proof.compare import HeldPart, flat, length

_FEW = 4
"""Ranks up to which every set of them is tried."""
_LAST = 82
"""After all that says why."""


def summed(case: GradientCase, change: Callable[[Tensor], Tensor]) -> Candidate:
    """What a rank would hold if each rank's gradient had been changed so before it was summed and divided as owed."""
    return together(case, lambda rows: torch.stack([change(row) for row in rows]).sum(0) / case.divisor)


def together(case: GradientCase, join: Callable[[Tensor], Tensor | None]) -> Candidate:
    """What a rank would hold if the gradients of the ranks that owe a sum, one in a row, had been joined so."""

    def candidate(part: HeldPart) -> Tensor | None:
        rows = case.owed_raws(part)
        return None if rows is None or len(rows) < 2 else join(rows)

    return candidate


def _is_summed_wrongly(case: GradientCase) -> bool:
    """Whether the ranks' gradients owe a sum, and what was found is not that."""
    return bool(case.raws and case.owed and case.wrong) and not case.reduction_is_right


@hypothesis("gradient")
def another_operation(case: GradientCase) -> Iterator[Claim]:
    """Mistake: a reduction with another operation than a sum, or of signs.

    Signature: the largest, smallest or product of the ranks' gradients, element by element, or the sum of their signs.
    """
    if not _is_summed_wrongly(case):
        return
    over, where = " and ".join(case.owed), "the operation that the reduction is given"
    operations: dict[str, Callable[..., Tensor]] = {
        "largest": torch.amax,
        "smallest": torch.amin,
        "product": torch.prod,
    }
    for word, operation in operations.items():
        residual = case.residual(together(case, partial(operation, dim=0)))
        what = f"is the {word} of the gradients of {over}, element by element, not their sum"
        yield Claim("wrong-operation", what, where, residual=residual)
    for word, divisor in (("sum", 1.0), ("mean", case.divisor)):
        residual = case.residual(together(case, partial(_signs, by=divisor)))
        what = f"is the {word} of the signs of the gradients of {over}, not of the gradients"
        yield Claim("wrong-operation", what, "what each rank sends", residual=residual)


@hypothesis("gradient")
def mean_of_those_who_have_it(case: GradientCase) -> Iterator[Claim]:
    """Mistake: rows of a sparse gradient (an embedding) are divided by the ranks that touched them.

    Signature: element by element, the mean over the ranks with something there.
    """
    if not _is_summed_wrongly(case):
        return
    over = " and ".join(case.owed)
    what = (
        f"is, element by element, the mean over those ranks of {over} that have something there, not over all of them"
    )
    where = "what rows of a sparse gradient are divided by"
    yield Claim("wrong-divisor", what, where, modes=tuple(case.owed), residual=case.residual(together(case, _of_some)))


def _of_some(rows: Tensor) -> Tensor | None:
    there = (rows != 0).sum(0)
    return None if bool((there == len(rows)).all()) else rows.sum(0) / there.clamp(min=1)


def _signs(rows: Tensor, by: float) -> Tensor:
    return rows.sign().sum(0) / by


@hypothesis("gradient")
def clipped_by_value(case: GradientCase) -> Iterator[Claim]:
    """Mistake: each rank clips the elements of its own gradient before the sum.

    Signature: the sum of gradients that are cut at one limit, read off the elements that are furthest off.
    """
    rows = case.owed_raws(case.wrong[0]) if _is_summed_wrongly(case) else None
    if rows is None:
        return
    found = flat(case.wrong[0].value) * case.divisor
    worst = (rows.sum(0) - found).abs().argsort(descending=True)[:_TRIED].tolist()
    limits = {f"{limit:.4g}": limit for at in worst for limit in _limits(rows[:, at], float(found[at]))}
    for told, limit in limits.items() if found.any() else ():
        what = f"is the sum of gradients whose elements each rank had clipped to {told}"
        residual = case.residual(summed(case, partial(torch.clamp, min=-limit, max=limit)))
        yield Claim("clipped-before-reduced", what, _ORDER, residual=residual)


def _limits(column: Tensor, found: float) -> Iterator[float]:
    """The limits by which these numbers have this sum: of one that is reached by the largest, by the largest two, and so on."""
    column = column[column.abs().argsort(descending=True)]
    for count in range(1, len(column) + 1):
        if signs := float(column[:count].sign().sum()):
            yield abs((found - float(column[count:].sum())) / signs)


_TRIED = 4
_ORDER = "the order of clipping and handlers"


@hypothesis("gradient")
def clipped_first(case: GradientCase) -> Iterator[Claim]:
    """Mistake: each rank clips its own gradient by its norm before the sum.

    Signature: the sum with the coefficients of the ranks' own norms: of all passes, of each pass, or of the sum after each.
    """
    if case.evidence.max_norm is None or not _is_summed_wrongly(case):
        return
    most, passes = case.evidence.max_norm, _gradients_of_passes(case)
    seen = case.gradient.clipped  # a script that clips by itself may sum what it has clipped, and step on that
    stepped = None if seen is None else replace(case, compared=seen)
    for whose, scale in (("its own", 1.0), ("its own, divided,", 1 / case.divisor)):
        whole = {rank: [_coefficient(_sum(some), most, scale)] * len(some) for rank, some in passes.items()}
        ways = {f"by {whose} norm": whole}
        if any(len(some) > 1 for some in passes.values()):
            each = {rank: [_coefficient(one, most, scale) for one in some] for rank, some in passes.items()}
            after = {rank: _after_each(some, most, scale) for rank, some in passes.items()}
            ways |= {f"in each micro-batch by {whose} norm": each, f"after each micro-batch by {whose} norm": after}
        for how, weights in ways.items():
            what = f"is the sum of gradients that each rank had clipped {how}"
            residual = case.residual(_weighed(case, weights))
            yield Claim("clipped-before-reduced", what, _ORDER, residual=residual)
            if stepped is not None:
                what = f"is not reduced yet when each rank clips it {how}, and is summed afterwards"
                residual = stepped.residual(_weighed(stepped, weights))
                yield Claim("clipped-before-reduced", what, _ORDER, residual=residual, rank=1)


_Gradient = dict[str, Tensor]


def _gradients_of_passes(case: GradientCase) -> dict[int, list[_Gradient]]:
    """By rank: what each of its passes gave, of all parameters."""
    found: dict[int, list[_Gradient]] = {}
    count = max((len(one.raw) for one in case.step.gradients.values()), default=0)
    for name, gradient in case.step.gradients.items():
        for number, some in enumerate(gradient.raw):
            for part in some:
                passes = found.setdefault(part.rank, [{} for _ in range(count)])
                passes[number][name] = flat(part.value) * case.raw_scale
    return found


def _sum(some: Sequence[_Gradient], weights: Sequence[float] | None = None) -> _Gradient:
    total: _Gradient = {}
    for weight, one in zip(weights or [1.0] * len(some), some, strict=True):
        for name, value in one.items():
            total[name] = total[name] + weight * value if name in total else weight * value
    return total


def _coefficient(one: _Gradient, most: float, scale: float) -> float:
    norm = sum(length(value) ** 2 for value in one.values()) ** 0.5
    return min(1.0, most / (norm * scale + 1e-6))


def _after_each(some: Sequence[_Gradient], most: float, scale: float) -> list[float]:
    """The weights of passes where all that is there is clipped after each of them."""
    weights: list[float] = []
    for number in range(1, len(some) + 1):
        weights.append(1.0)
        share = _coefficient(_sum(some[:number], weights), most, scale)
        weights = [weight * share for weight in weights]
    return weights


def _weighed(case: GradientCase, weights: dict[int, list[float]]) -> Candidate:
    def candidate(part: HeldPart) -> Tensor | None:
        total = None
        for number, some in enumerate(case.gradient.raw):
            alone = case.of_pass(some)
            for rank in case.groups.joint(tuple(case.owed), part.rank):
                raw = alone.raw_at(rank, part) if rank in alone.raws else None
                if raw is not None:
                    total = raw * weights[rank][number] + (0.0 if total is None else total)
        return None if total is None else total / case.divisor

    return candidate


@hypothesis("gradient")
def whole_numbers(case: GradientCase) -> Iterator[Claim]:
    """Mistake: gradients are sent as whole numbers of 8 or 4 bits, and nobody keeps the rest.

    Signature: the sum of gradients in units of each rank's largest element.
    """
    for bits in (8, 4) if _is_summed_wrongly(case) else ():
        for levels in (2 ** (bits - 1) - 1, 2 ** (bits - 1)):
            residual = case.residual(summed(case, partial(_in_levels, levels=levels)))
            what = f"is the sum of gradients that were rounded to {bits} bits"
            yield Claim("rounded", what, "what gradients are sent as, and who keeps the rest", residual=residual)


def _in_levels(row: Tensor, levels: int) -> Tensor:
    unit = row.abs().max() / levels
    return (row / unit).round() * unit if unit else row


@hypothesis("gradient")
def of_some_something_else(case: GradientCase) -> Iterator[Claim]:
    """Mistake: some ranks send a gradient of the step before, or of another parameter, instead of their own or on top of it.

    Signature: the sum with these in place of theirs. Every set of ranks is tried, up to a few ranks.
    """
    ranks = case.groups.joint(tuple(case.owed), case.wrong[0].rank) if _is_summed_wrongly(case) else ()
    if not 1 < len(ranks) <= _FEW:
        return
    some_of_them = [some for count in range(1, len(ranks)) for some in combinations(ranks, count)]
    for (cause, whose, where, other), some, added in product(_other_sources(case), some_of_them, (False, True)):

        def candidate(
            part: HeldPart, other: GradientCase = other, some: tuple[int, ...] = some, added: bool = added
        ) -> Tensor | None:
            sent = [(other if rank in some else case).raw_at(rank, part) for rank in ranks]
            sent += [case.raw_at(rank, part) for rank in some if added]
            return None if any(one is None for one in sent) else torch.stack(sent).sum(0) / case.divisor  # type: ignore[arg-type]

        what = f"has {whose} of ranks {list(some)} in its sum" + (", on top of their own" if added else "")
        yield Claim(cause, what, where, residual=case.residual(candidate))


def _other_sources(case: GradientCase) -> Iterator[tuple[str, str, str, GradientCase]]:
    """(cause, whose gradient, where to look, a case whose raw gradients are those): what a rank may send by mistake."""
    before = case.evidence.steps[case.at - 1].gradients.get(case.name) if case.at else None
    if before is not None:
        old = case.of_pass(list(sum_of_passes(before.raw).values()))
        yield "stale-gradient", "the gradient of the step before", "when these ranks send, and what they wait for", old
    size = case.compared.truth.numel()
    names = [name for name, one in case.step.gradients.items() if one.raw and one.total.truth.numel() == size]
    for name in [name for name in names if name != case.name][:_FEW]:
        other = case.of_pass(list(sum_of_passes(case.step.gradients[name].raw).values()))
        where = "when these ranks send, and who writes to the buffer meanwhile"
        yield "gradients-exchanged", f"the gradient of {name}", where, other


@hypothesis("gradient")
def weights_inside(case: GradientCase) -> Iterator[Claim]:
    """Mistake: weight decay (or an optimizer's trick) is added to the gradient before the sum.

    Signature: the truth and a constant times the weight.
    """
    start = case.evidence.steps[case.at - 1].weights if case.at else case.evidence.weights_at_start
    if case.name not in start or not case.wrong:
        return
    weight = case.moved_to(start[case.name].truth)
    part = case.wrong[0]
    truth, mine = case.truth(part), weight(part)
    if truth is None or mine is None or not bool(mine.any()) or len(mine) < 2:
        return
    share = float((flat(part.value) - truth) @ mine) / float(mine @ mine)

    def candidate(part: HeldPart) -> Tensor | None:
        own, theirs = case.truth(part), weight(part)
        return None if own is None or theirs is None else own + share * theirs

    what = f"has {share:.4g} times the weight in it"
    where = "weight decay that is added to gradients, and by whom: the optimizer does its own"
    yield Claim("weights-in-gradient", what, where, share, residual=case.residual(candidate))


@hypothesis("gradient")
def thinned_out(case: GradientCase) -> Iterator[Claim]:
    """Mistake: ranks send their largest elements only.

    Signature: each element is the sum over some of the ranks, over other ones than its neighbour.
    """
    if not _is_summed_wrongly(case):
        return

    def candidate(part: HeldPart) -> Tensor | None:
        rows = case.owed_raws(part)
        if rows is None or not 1 < len(rows) <= _FEW:
            return None
        found = flat(part.value)
        chosen = torch.tensor(list(product((0.0, 1.0), repeat=len(rows))), dtype=torch.float64)
        sums = chosen @ rows / case.divisor
        return sums.gather(0, (sums - found).abs().argmin(0, keepdim=True)).squeeze(0)

    what = "has in each element the sum over some of the ranks only, not the same in all: what others had there is lost"
    where = "what each rank sends: a choice of elements (the largest, say), and who keeps the rest for later"
    yield Claim("missing-gradient", what, where, residual=case.residual(candidate), rank=_LAST)

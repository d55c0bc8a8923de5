"""A gradient that was reduced by a wrong factor, over wrong ranks, or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from colonnade.proof.case import (
    ACCUMULATION,
    Candidate,
    Factor,
    GradientCase,
    is_loss_scale,
    near,
    sum_of_passes,
)
from colonnade.proof.claims import Claim, hypothesis, sum_not_made
from colonnade.proof.compare import HeldPart, distance, flat, in_units, length, uncovered


@hypothesis("gradient")
def nothing_arrived(case: GradientCase) -> Iterator[Claim]:
    """Mistake: the parameter is cut off the loss, or its gradient is zeroed before the step.

    Signature: all zero, or not there at all.
    """
    if not case.compared.found:
        yield Claim(
            "missing-gradient",
            "is there on no rank",
            "what cuts it off the loss (detach, no_grad, requires_grad, a stage that does not use it)",
        )
    elif left := uncovered(case.compared):
        what = f"has {left} elements that no rank holds"
        yield Claim("missing-gradient", what, "how it is cut, and which ranks hold its last rows")
    elif _is_zero(case):
        where = f"{_CUT_OFF} or zeroes it before the step"
        yield Claim("missing-gradient", f"is zero on {_ranks(case)}", where)
    elif case.wrong and case.owed and (silent := _silent(case)):
        what = (
            f"has nothing of ranks {silent}, whose backward passes give none, though their share of the batch has one"
        )
        yield Claim("missing-gradient", what, f"{_CUT_OFF} there", residual=case.residual(case.due))


_CUT_OFF = "what cuts it off the loss (detach, no_grad, a branch not taken)"


def _silent(case: GradientCase) -> list[int]:
    """Ranks without a raw gradient, where every share of the batch has one, and each of the ranks has a share."""
    ranks, shares = case.groups.joint(tuple(case.owed), case.wrong[0].rank), case.gradient.truth_of_shards
    if not case.raws or len(shares) != len(ranks) or not all(bool(share.any()) for share in shares):
        return []
    return [rank for rank in ranks if rank not in case.raws or not case.raws[rank].value.any()]


def _is_zero(case: GradientCase) -> bool:
    return bool(case.wrong) and all(not part.value.any() for part in case.wrong)


@hypothesis("gradient")
def of_the_step_before(case: GradientCase) -> Iterator[Claim]:
    """Mistake: gradients are not cleared, or a buffer is read too late.

    Signature: the gradient of the step before, alone or added to this one's.
    """
    where = "when the buffers of the sum are read, and when they are cleared"
    if _is_zero(case) and case.later is not None and case.later.found:
        late = max(distance(part, case.compared.truth) for part in case.later.found)
        what = "comes one step late: the next step has it"
        residual = in_units(late, case.row.tolerance)
        yield Claim("stale-gradient", what, where, residual=residual, rank=-1)
    before = case.before
    if before is None:
        return

    def old(part: HeldPart) -> Tensor | None:
        wanted = flat(before)
        return wanted if part.positions is None else wanted[part.positions.flatten()]

    def both(part: HeldPart) -> Tensor | None:
        mine, other = case.truth(part), old(part)
        return None if mine is None or other is None else mine + other

    if length(before):
        yield Claim("stale-gradient", "is that of the step before", where, residual=case.residual(old))
        what = "is this step's plus that of the step before, which was not cleared"
        yield Claim("stale-gradient", what, "zero_grad and " + where, residual=case.residual(both))


@hypothesis("gradient")
def wrong_factor(case: GradientCase) -> Iterator[Claim]:
    """Mistake: a divisor too many, too few or of the wrong group; a scaled loss.

    Signature: a constant times the truth. The constant, and which other gradients share it, name the mistake.
    """
    fitted = case.fit(case.truth)
    if fitted is None or case.residual(case.truth, fitted[0]) > 1:
        return
    value, within = fitted
    if abs(value) <= within:
        return  # nothing arrived
    yield from _divided_by_the_group(case, value, within)
    explained = near(value, case.sizes, max(within, 1e-9))
    for factor in explained:
        residual = case.residual(case.truth, factor.value)
        modes = tuple(name for name, _ in factor.powers)
        for claim in _meanings(case, factor):
            doubt = sum(case.is_shared(mode) for mode in modes)
            yield replace(claim, factor=factor.value, modes=modes, residual=residual, doubt=doubt)
    if not explained and not (case.wrong[0].value.numel() == 1 and case.compared.truth.numel() < 3):
        yield _unexplained(case, value)


def _divided_by_the_group(case: GradientCase, value: float, within: float) -> Iterator[Claim]:
    """Divided by the ranks that communicate, where others saw distinct data too: experts are such."""
    if case.backward_is_right is False:
        return
    for mode, ranks, divisor in case.info.owed:
        if divisor > len(ranks) and abs(value - divisor / len(ranks)) <= max(within, 1e-9):
            by = f"by the {len(ranks)} ranks of its {mode} group" if len(ranks) > 1 else "by nothing"
            what = f"is {value:g} times what it should be: divided {by}, though {divisor:g} ranks saw distinct data"
            residual = case.residual(case.truth, divisor / len(ranks))
            yield Claim("wrong-divisor", what, "the divisor of its sum", value, (mode,), residual, rank=1)


def _meanings(case: GradientCase, factor: Factor) -> Iterator[Claim]:
    """What a product of sizes means for this parameter, by what it owes and by where the factor comes in."""
    size = f"{factor.value:g} times what it should be ({factor})"
    in_backward = case.backward_is_right is False and case.reduction_is_right is True
    if len(factor.powers) > 1 or abs(factor.powers[0][1]) != 1:
        yield _product(case, factor, size, in_backward)
        return
    name, power = factor.powers[0]
    if name == ACCUMULATION:
        words = "is not divided by" if power > 0 else "is divided once too often by"
        what = f"is {size}: it {words} the number of micro-batches"
        where = "what each micro-batch's loss is divided by"
        yield Claim("scaled-by-accumulation", what, where, rank=40 if case.backward_is_right else 0)
    elif power < 0 and case.owed.get(name, 1.0) > 1 and in_backward and _are_parts(case):
        what = f"is {size}: each rank has a part of it, and the mean over {name} is taken where their sum is due"
        yield Claim("averaged-not-summed", what, f"a loss of what several ranks of {name} gave, and who scales it")
    elif case.everywhere and (in_backward or (name not in case.owed and case.backward_is_right is not True)):
        words = "multiplied" if power > 0 else "divided"
        what = f"is {size} like every other one: the loss is {words} by the size of {name}"
        yield Claim("scaled-by-mode", what, "the scale of the loss, and sums of it that have a gradient")
    elif in_backward:
        yield _in_backward(name, power, size)
    elif name in case.owed:
        yield _owed(name, power, size, case.owed[name])
    elif power > 0:
        what = f"is {size}: summed over {name}, though each of its ranks has all of it"
        yield Claim("summed-not-averaged", what, f"who sums it over {name} without being owed that")
    else:
        what = f"is {size}: divided by the size of {name}, though nothing is owed over it"
        yield Claim("wrong-divisor", what, f"divisors that count {name}")


def _are_parts(case: GradientCase) -> bool:
    """Whether the raw gradients are parts of the true one, and none is that of a share of the batch, scaled."""
    shares = [flat(one) for one in case.gradient.truth_of_shards]
    if len(shares) != len(case.groups.joint(tuple(case.owed), case.wrong[0].rank)):
        return False  # some of the ranks share a share
    for raw in case.raws.values():
        for share in shares:
            if len(share) != raw.value.numel() or length(share) == 0:
                return False
            scale = float(flat(raw.value) @ share) / float(share @ share)
            if length(flat(raw.value) - scale * share) <= case.row.tolerance * max(1.0, scale):
                return False
    return bool(shares)


def _in_backward(mode: str, power: float, size: str) -> Claim:
    where = "the backward pass of the layer's collectives"
    if power > 0:
        what = f"is {size} before any reduction: a backward pass sums over {mode} what is whole on each of its ranks"
        return Claim("scaled-by-mode", what, where)
    what = f"is {size} before any reduction: a backward pass divides by the size of {mode}"
    return Claim("scaled-by-mode", what, where)


def _owed(mode: str, power: float, size: str, divisor: float) -> Claim:
    handler = f"the handler that sums over {mode}"
    if divisor > 1 and power > 0:
        what = f"is {size}: summed over {mode} and not divided by {divisor:g} (or summed a second time)"
        return Claim("summed-not-averaged", what, handler)
    if divisor > 1:
        what = f"is {size}: divided by the size of {mode} once more than owed"
        return Claim("wrong-divisor", what, f"{handler}, and the scale of the loss")
    if power > 0:
        return Claim(
            "reduced-twice", f"is {size}: summed over {mode} twice", f"{handler}, and the layer's own backward"
        )
    return Claim("averaged-not-summed", f"is {size}: averaged over {mode}, where a sum is owed", handler)


def _product(case: GradientCase, factor: Factor, size: str, in_backward: bool) -> Claim:
    powers = dict(factor.powers)
    if in_backward:
        what = f"is {size} before any reduction: the loss, or a backward pass, is scaled by {factor}"
        return Claim("scaled-by-mode", what, "the scale of the loss, and sums that have a gradient")
    owed = {name: case.owed.get(name, 0.0) for name in powers}
    if all(power == 1 and owed[name] > 1 for name, power in powers.items()):
        what = f"is {size}: summed over {' and '.join(powers)} and divided by neither"
        return Claim("summed-not-averaged", what, "the handlers of these sums")
    if all(power == 2 for power in powers.values()):
        return Claim("reduced-twice", f"is {size}: summed twice and not divided", "who sums it")
    what = f"is {size}: divided by another number than that of the ranks that saw distinct data"
    return Claim("wrong-divisor", what, "the divisor of its sums")


def _unexplained(case: GradientCase, value: float) -> Claim:
    residual = case.residual(case.truth, value)
    if is_loss_scale(value, 1e-6):
        what = f"is {value:g} times what it should be, a power of two as loss scales are"
        return Claim("loss-scale-left", what, "where gradients are unscaled", value, residual=residual, rank=50)
    if case.healthy and case.forward_is_right and case.backward_is_right is False and case.reduction_is_right:
        what = f"is {value:.6g} times what it should be before any reduction, while that of {sorted(case.healthy)[0]} is right"
        return Claim("backward-differs", what, _BY_HAND, value, residual=residual, rank=50)
    what = f"is {value:.6g} times what it should be, which is no product of sizes here"
    where = "what the loss is divided by: a count of tokens with padding, or of this rank's share only"
    return Claim("wrong-divisor", what, where, value, residual=residual, rank=50)


_BY_HAND = "backward passes that are written by hand, and hooks, between it and what is right"


@hypothesis("gradient")
def over_other_ranks(case: GradientCase) -> Iterator[Claim]:
    """Mistake: the sum is made over other modes than owed: fewer, more or none.

    Signature: the sum of the ranks' own gradients over those modes, divided as usual.
    """
    if not case.raws or not case.wrong or case.reduction_is_right:
        return
    fitted = case.fit(case.truth)
    if fitted is not None and case.residual(case.truth, fitted[0]) <= 1:
        return
    for modes in case.groups.subsets():
        missing = [mode for mode in case.owed if not _reaches(case, modes, (mode,))]
        extra = [mode for mode in modes if not _reaches(case, tuple(case.owed), (mode,))]
        if missing or extra:
            yield from _sum_over(case, modes, missing, extra)


def _reaches(case: GradientCase, modes: Sequence[str], others: Sequence[str]) -> bool:
    return all(
        set(case.groups.joint(others, part.rank)) & set(case.raws) <= set(case.groups.joint(modes, part.rank))
        for part in case.wrong
    )


def _sum_over(
    case: GradientCase, modes: Sequence[str], missing: Sequence[str], extra: Sequence[str]
) -> Iterator[Claim]:
    candidate = case.raw_sum(modes)
    fitted = case.fit(candidate)
    if fitted is None:
        return
    done = 1.0
    for mode in modes:
        done *= case.owed.get(mode, 1.0)
    usual = [1 / case.divisor, 1 / done, 1.0, 1 / len(case.groups.joint(modes, case.wrong[0].rank))]
    factors = [one for one in usual if abs(one - fitted[0]) <= max(fitted[1], 1e-9)]
    factors += [one.value for one in near(fitted[0], case.sizes, max(fitted[1], 1e-9))]
    if not factors and sum(part.value.numel() for part in case.wrong) >= 8:
        what = _name_sum(case, modes, missing, extra)
        odd = f"{what.what}, and is {fitted[0]:.4g} times that"
        yield replace(what, what=odd, residual=case.residual(candidate, fitted[0]), doubt=2)
    if not factors:
        return
    residual = min(case.residual(candidate, factor) for factor in factors[:3])
    doubt = int(factors[0] not in usual)
    yield replace(_name_sum(case, modes, missing, extra), residual=residual, doubt=doubt)


def _name_sum(case: GradientCase, modes: Sequence[str], missing: Sequence[str], extra: Sequence[str]) -> Claim:
    owed = " and ".join(case.owed) or "nothing"
    if extra and not missing and all(case.is_replicated(mode) for mode in extra):
        what = f"is summed over {' and '.join(extra)} too, where nothing is owed"
        return Claim("summed-not-averaged", what, f"who sums it over {' and '.join(extra)}", modes=tuple(extra))
    if extra:
        what = f"is the sum over {' and '.join(modes)}, but {owed} is owed"
        where = "the group that its sum is given"
        return Claim("reduced-over-other-mode", what, where, modes=tuple(missing))
    over = " and ".join(missing)
    own = "this rank's own, " if not modes else ""
    return sum_not_made(case, missing, f"is {own}not reduced over {over}")


@hypothesis("gradient")
def with_another_parameter(case: GradientCase) -> Iterator[Claim]:
    """Mistake: gradients are summed by number over ranks that hold other parameters, as stages of a pipeline do.

    Signature: the sum with the n-th gradient of the other ranks.
    """
    if not case.raws or not case.wrong or case.reduction_is_right:
        return
    for modes in case.groups.subsets():
        met = {
            _counterpart(case, part.rank, rank) for part in case.wrong for rank in case.groups.joint(modes, part.rank)
        }
        others = sorted(name for name in met if name is not None and name != case.name)
        candidate = _sum_by_number(case, modes)
        fitted = case.fit(candidate) if others else None
        if fitted is None:
            continue
        within = max(fitted[1], 1e-9)
        if abs(fitted[0] - 1) > within and not near(fitted[0], case.sizes, within):
            continue
        what = f"is summed over {' and '.join(modes)}, some of whose ranks hold another parameter in its place"
        where = f"the group that its sum is given, in which it meets {others[0]}"
        residual = case.residual(candidate, fitted[0])
        yield Claim("reduced-over-other-mode", what, where, modes=tuple(case.owed), residual=residual)


def _counterpart(case: GradientCase, rank: int, other: int) -> str | None:
    """The parameter that is on another rank what this one is here, by its number among those with a gradient."""
    held = [
        [
            name
            for name, one in case.step.gradients.items()
            if any(part.rank == each for some in one.raw for part in some)
        ]
        for each in (rank, other)
    ]
    at = held[0].index(case.name) if case.name in held[0] else len(held[1])
    return held[1][at] if at < len(held[1]) else None


def _sum_by_number(case: GradientCase, modes: Sequence[str]) -> Candidate:
    def candidate(part: HeldPart) -> Tensor | None:
        total = torch.zeros(part.value.numel(), dtype=torch.float64)
        for rank in case.groups.joint(modes, part.rank):
            name = _counterpart(case, part.rank, rank)
            raw = sum_of_passes(case.step.gradients[name].raw, case.raw_scale).get(rank) if name is not None else None
            if raw is None or raw.value.numel() != len(total):
                return None
            total += raw.value
        return total

    return candidate


@hypothesis("gradient")
def parts_that_add_up(case: GradientCase) -> Iterator[Claim]:
    """Mistake: a sum is due that no placement tells of, or that a layer should make in its backward pass.

    Signature: the parts that ranks hold of the same elements add up to the truth.
    """
    if len(case.wrong) < 2 or len({part.value.numel() for part in case.wrong}) > 1:
        return
    for mode in [mode for mode in case.groups.of_mode if not case.raws or mode not in case.owed]:
        apart = [_sum_of_parts(case, part, mode) for part in case.wrong]
        if any(one is None for one in apart):
            continue
        residual = max(length(one) for one in apart if one is not None) / (case.row.tolerance or 1.0)
        tied = bool(case.info.tied) or "PIPELINE" in mode.upper()
        what = f"adds up to the true one over {mode}: each of its ranks has a part, and nobody sums them"
        yield Claim(
            "tied-copy-missed" if tied else "partial-gradient",
            what,
            f"its placement, which should say that a sum over {mode} is owed, or the layer that should make that sum",
            None,
            (mode,),
            residual,
        )


def _sum_of_parts(case: GradientCase, part: HeldPart, mode: str) -> Tensor | None:
    """The sum over the group of what is found, minus the truth."""
    ranks = case.groups.joint((mode,), part.rank)
    some = [flat(other.value) for other in case.compared.found if other.rank in ranks]
    truth = case.truth(part)
    if truth is None or len(some) < 2 or any(len(one) != len(truth) for one in some):
        return None
    return torch.stack(some).sum(0) - truth


@hypothesis("gradient")
def lost_on_the_way_down(case: GradientCase) -> Iterator[Claim]:
    """Mistake: a backward pass between the loss and this parameter is wrong.

    Signature: by elimination. Forward pass and loss are right, sums are made as owed, and the gradient is not the true one.
    """
    if case.backward_is_right is not False or not case.reduction_is_right or not case.forward_is_right:
        return
    fitted, others = case.fit(case.truth), [m for m in case.groups.of_mode if m != "DATA" and case.differs_over(m)]
    after = f", while that of {sorted(case.healthy)[0]} is right" if case.healthy else ""
    how = f"reduced as owed, and not the true one{after}"
    if fitted is not None and fitted[0] < 1 and others:
        what = f"is what the ranks' own passes give, {how}: a part that crosses ranks of {' and '.join(others)} is lost"
        where = f"the backward pass of what gathers or sends over {' and '.join(others)}: it owes a sum"
        yield Claim("partial-gradient", what, where, modes=tuple(others), residual=0.9, rank=90)
    else:
        yield Claim("backward-differs", f"is what the ranks' own passes give, {how}", _BY_HAND, residual=0.9, rank=90)


def _ranks(case: GradientCase) -> str:
    ranks = sorted({part.rank for part in case.wrong})
    everyone = {part.rank for part in case.compared.found}
    return "every rank" if set(ranks) == everyone else f"ranks {ranks}"

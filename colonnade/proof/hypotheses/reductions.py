"""A gradient that was reduced with a wrong factor, over wrong ranks, or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from colonnade.proof.case import (
    ACCUMULATION,
    Factor,
    GradientCase,
    digits,
    is_loss_scale,
    near,
    sum_of_passes,
)
from colonnade.proof.claims import Claim, hypothesis, sum_not_made
from colonnade.proof.compare import LocalValue, distance, flat, in_units, length, uncovered

_CUT_OFF = "what disconnects it from the loss (detach, no_grad, a branch not taken)"
_BY_HAND = (
    "custom backward passes, collectives without a backward pass (dist.all_gather) and hooks between it and the parameters "
    "whose gradients are right"
)


@hypothesis("gradient")
def nothing_arrived(case: GradientCase) -> Iterator[Claim]:
    """Mistake: the parameter is disconnected from the loss, or its gradient is zeroed before the step.

    Signature: the gradient is all zero, or absent.
    """
    if not case.compared.found and case.gradient.held:
        what = "is accumulated by FSDP on every rank, but not reduced: gradient synchronization is off when the optimizer steps"
        where = "calls of set_requires_gradient_sync: it has to be on in the last backward pass of a step"
        yield Claim("missing-gradient", what, where, rank=-1)
    elif not case.compared.found:
        where = "what disconnects it from the loss (detach, no_grad, requires_grad, a stage that does not use it)"
        yield Claim("missing-gradient", "is missing on every rank", where)
    elif left := uncovered(case.compared):
        what = f"has {left} elements that no rank stores"
        yield Claim("missing-gradient", what, "how it is sharded, and which ranks store its last rows")
    elif _is_zero(case):
        zero, everyone = {part.rank for part in case.wrong}, {part.rank for part in case.compared.found}
        what = f"is zero on {'every rank' if zero == everyone else f'ranks {sorted(zero)}'}"
        yield Claim("missing-gradient", what, f"{_CUT_OFF} or zeroes it before the step")
    elif case.wrong and case.required and case.raws:
        # Ranks whose backward pass gives nothing. That is only a mistake if the reference has a gradient for their batch,
        # which is known if each of these ranks has a batch of its own.
        ranks, batches = case.groups.joint(tuple(case.required), case.wrong[0].rank), case.gradient.truth_of_data_ranks
        silent = [rank for rank in ranks if rank not in case.raws or not case.raws[rank].value.any()]
        if silent and len(batches) == len(ranks) and all(bool(x.any()) for x in batches):
            what = f"lacks the contribution of ranks {silent}: their backward passes give no gradient, although their batches have one"
            yield Claim("missing-gradient", what, f"{_CUT_OFF} there", residual=case.residual(case.due))


def _is_zero(case: GradientCase) -> bool:
    return bool(case.wrong) and all(not part.value.any() for part in case.wrong)


@hypothesis("gradient")
def of_the_step_before(case: GradientCase) -> Iterator[Claim]:
    """Mistake: gradients are not cleared, or a buffer is read before the reduction of this step has written it.

    Signature: the gradient of the previous step, instead of this step's or added to it.
    """
    where = "when the reduction reads its buffers, and when they are cleared"
    if _is_zero(case) and case.later is not None and case.later.found:
        late = max(distance(part, case.compared.truth) for part in case.later.found)
        # The first step has no previous gradient. It is zero there, and appears in the next step.
        what = "arrives one step late: the next step has it"
        residual = in_units(late, case.row.tolerance)
        yield Claim("stale-gradient", what, where, residual=residual, rank=-1)
    before = case.before
    if before is None:
        return

    def old(part: LocalValue) -> Tensor | None:
        wanted = flat(before)
        return wanted if part.positions is None else wanted[part.positions.flatten()]

    def both(part: LocalValue) -> Tensor | None:
        truth, other = case.truth(part), old(part)
        return None if truth is None or other is None else truth + other

    if length(before):
        yield Claim("stale-gradient", "is that of the previous step", where, residual=case.residual(old))
        what = "is the sum of this step's gradient and that of the previous step, which was not cleared"
        yield Claim("stale-gradient", what, f"calls of zero_grad, and {where}", residual=case.residual(both))


@hypothesis("gradient")
def wrong_factor(case: GradientCase) -> Iterator[Claim]:
    """Mistake: a missing or additional divisor, a divisor of the wrong group, or a scaled loss.

    Signature: a constant times the truth. The constant and the other gradients with the same constant name the mistake.
    """
    fitted = case.fit(case.truth)
    if fitted is None or case.residual(case.truth, fitted[0]) > 1:
        return
    value, within = fitted
    if abs(value) <= within:
        return  # the gradient is zero
    exact = max(within, 1e-9)

    # Divided by the ranks that communicate, although more ranks contributed data. Experts are such parameters: their
    # expert-data group sums what all data ranks sent.
    for mode, ranks, divisor in case.info.required if case.backward_is_right is not False else ():
        if divisor > len(ranks) and abs(value - divisor / len(ranks)) <= exact:
            by = f"is divided by the {len(ranks)} ranks of its {mode} group" if len(ranks) > 1 else "is not divided"
            what = f"is {value:g} times what it should be: it {by}, but {divisor:g} ranks saw distinct data"
            residual = case.residual(case.truth, divisor / len(ranks))
            yield Claim("wrong-divisor", what, "the divisor of its reduction", value, (mode,), residual, rank=1)

    # A product of sizes of the layout. What it means depends on the reductions of the parameter; if a healthy parameter
    # has the same reduction, a mistake there is less likely.
    explained = near(value, case.sizes, exact)
    for factor in explained:
        residual = case.residual(case.truth, factor.value)
        modes = tuple(name for name, _ in factor.powers)
        claim = _meaning(case, factor)
        doubt = 0 if claim.is_local else sum(case.shared_with(mode) is not None for mode in modes)
        yield replace(claim, factor=factor.value, modes=modes, residual=residual, doubt=doubt)
    # A single number is a multiple of any other, so a factor that is no product of sizes means nothing there.
    if explained or (case.wrong[0].value.numel() == 1 and case.compared.truth.numel() < 3):
        return

    # Any other constant.
    residual = case.residual(case.truth, value)
    local = case.local_factor
    after = (
        local is not None and abs(local - 1) <= 1e-6
    )  # the local gradients are right, so it comes after the backward pass
    if is_loss_scale(value, 1e-6) or (after and value >= 16 and is_loss_scale(256 * value, 1e-6)):
        what = f"is {value:g} times what it should be, a power of two as loss scales are"
        yield Claim("loss-scale-left", what, "where gradients are unscaled", value, residual=residual, rank=50)
    elif case.healthy and case.forward_is_right and case.backward_is_right is False and case.reduction_is_right:
        what = (
            f"is {digits(value)} times what it should be before any reduction, while the gradient of "
            f"{sorted(case.healthy)[0]} is right"
        )
        yield Claim("backward-differs", what, _BY_HAND, value, residual=residual, rank=50)
    elif after:
        what = f"is {digits(value)} times what it should be, which is no product of group sizes, while the local gradients are right"
        where = "code that scales gradients between the backward pass and the step of the optimizer"
        yield Claim("wrong-divisor", what, where, value, residual=residual, rank=50)
    else:
        what = f"is {digits(value)} times what it should be, which is no product of group sizes"
        where = "the divisor of the loss: a count that includes padding tokens, or only the tokens of this rank"
        yield Claim("wrong-divisor", what, where, value, residual=residual, rank=50)


def _meaning(case: GradientCase, factor: Factor) -> Claim:
    """The meaning of a product of sizes for this parameter, by its required reductions and by where the factor comes in."""
    size = f"{factor.value:g} times what it should be ({case.groups.spelled(factor)})"
    local = case.local_factor
    in_backward = (case.backward_is_right is False and case.reduction_is_right is True) or (
        local is not None and abs(local - factor.value) <= 1e-6 * factor.value
    )
    # Shards are different elements, so nothing can sum them over the ranks of their mode. A collective in a backward pass can.
    if len(factor.powers) == 1 and factor.powers[0][1] == 1:
        mode = factor.powers[0][0]
        is_sharded = mode in case.groups.of_mode and mode not in case.required and not case.is_replicated(mode)
        in_backward = in_backward or (is_sharded and not case.raws and case.forward_is_right)
    if len(factor.powers) > 1 or abs(factor.powers[0][1]) != 1:
        powers = dict(factor.powers)
        if in_backward:
            what = f"is {size} before any reduction: the loss, or a backward pass, is scaled by {factor}"
            where = "the scale of the loss, and reductions that autograd differentiates"
            return Claim("scaled-by-mode", what, where, is_local=True)
        if all(power == 1 and case.required.get(name, 0.0) > 1 for name, power in powers.items()):
            what = f"is {size}: summed over {' and '.join(powers)}, but divided by the size of neither"
            return Claim("summed-not-averaged", what, "the handlers of these reductions")
        if all(power == 2 for power in powers.values()):
            return Claim("reduced-twice", f"is {size}: summed twice and not divided", "all handlers that sum it")
        what = f"is {size}: not divided by the number of ranks that saw distinct data"
        return Claim("wrong-divisor", what, "the divisor of its reductions")

    name, power = factor.powers[0]
    # A loss (or a term of it) that is not divided by the number of passes scales all parameters of a module.
    module = case.name.rpartition(".")[0]
    if name == ACCUMULATION and not (in_backward and any(other.rpartition(".")[0] == module for other in case.healthy)):
        words = "is not divided by" if power > 0 else "is divided once too often by"
        what = f"is {size}: it {words} the number of micro-batches"
        where = "the divisor of each micro-batch's loss"
        return Claim("scaled-by-accumulation", what, where, rank=40 if case.backward_is_right else 0)
    if power < 0 and case.required.get(name, 1.0) > 1 and in_backward and _raws_are_partial(case):
        what = f"is {size}: each rank has a partial gradient, and {name} takes their mean instead of their sum"
        return Claim(
            "averaged-not-summed",
            what,
            f"a loss that is computed from outputs of several ranks of {name}, and its scale",
        )
    if case.everywhere and (in_backward or (name not in case.required and case.backward_is_right is not True)):
        words = "multiplied" if power > 0 else "divided"
        what = f"is {size}, like every other gradient: the loss is {words} by the size of {name}"
        where = "the scale of the loss, and reductions of it that autograd differentiates"
        return Claim("scaled-by-mode", what, where, is_local=True)
    if in_backward:
        # The loss is not scaled, or every gradient would be. A hook and a collective give the same numbers.
        after = f", while the gradient of {sorted(case.healthy)[0]} is right" if case.healthy else ""
        if name == ACCUMULATION:
            what = f"is {size} before any reduction, in each micro-batch{after}"
            return Claim("scaled-by-mode", what, f"hooks on it, and {_BY_HAND}", is_local=True)
        words = (
            f"sums over {name} a value that each of its ranks has in full"
            if power > 0
            else f"divides by the size of {name}"
        )
        what = f"is {size} before any reduction{after}: a hook scales it, or a backward pass {words}"
        sums = " (that of torch.distributed.nn.functional.all_reduce sums too)" if power > 0 else ""
        where = f"hooks on it, and the backward pass of the layer's collectives{sums}"
        return Claim("scaled-by-mode", what, where, is_local=True)

    divisor = case.required.get(name)
    if divisor is None and power > 0:
        what = f"is {size}: summed over {name}, although each of its ranks has the full gradient"
        return Claim("summed-not-averaged", what, f"handlers that sum it over {name}, where no reduction is required")
    if divisor is None:
        what = f"is {size}: divided by the size of {name}, although no reduction over it is required"
        return Claim("wrong-divisor", what, f"divisors that count the ranks of {name}")
    handler = f"the handler that sums over {name}" if case.info.ledger else f"the code that sums over {name}"
    other = case.shared_with(name)
    if divisor > 1 and power > 0 and other is not None and case.backward_is_right is not False:
        what = f"is {size}, while that of {other}, which has the same reduction, is right: only this one is scaled, or reduced twice"
        return Claim("summed-not-averaged", what, "hooks on it, and the code that reduces or scales it", is_local=True)
    if divisor > 1 and power > 0:
        what = f"is {size}: summed over {name} and not divided by {divisor:g} (or summed twice)"
        return Claim("summed-not-averaged", what, handler)
    if divisor > 1:
        what = f"is {size}: divided by the size of {name} once too often"
        return Claim("wrong-divisor", what, f"{handler}, and the scale of the loss")
    if power > 0:
        return Claim(
            "reduced-twice", f"is {size}: summed over {name} twice", f"{handler}, and the layer's own backward"
        )
    return Claim("averaged-not-summed", f"is {size}: averaged over {name}, where a sum is required", handler)


def _raws_are_partial(case: GradientCase) -> bool:
    """Whether the local gradients are partial sums of the true one, and none of them is that of one rank's batch, scaled."""
    batches = [flat(x) for x in case.gradient.truth_of_data_ranks]
    if len(batches) != len(case.groups.joint(tuple(case.required), case.wrong[0].rank)):
        return False  # some of the ranks have the same batch
    for raw in case.raws.values():
        for batch in batches:
            if len(batch) != raw.value.numel() or length(batch) == 0:
                return False
            scale = float(flat(raw.value) @ batch) / float(batch @ batch)
            if length(flat(raw.value) - scale * batch) <= case.row.tolerance * max(1.0, scale):
                return False
    return bool(batches)


@hypothesis("gradient")
def over_other_ranks(case: GradientCase) -> Iterator[Claim]:
    """Mistake: the reduction is over other modes than required: fewer, more or none.

    Signature: the sum of the ranks' local gradients over those modes, divided as usual.
    """
    if not case.raws or not case.wrong or case.reduction_is_right:
        return
    fitted = case.fit(case.truth)
    if fitted is not None and case.residual(case.truth, fitted[0]) <= 1:
        return  # a constant times the truth: `wrong_factor`
    for modes in case.groups.subsets():
        missing = [mode for mode in case.required if not _reaches(case, modes, (mode,))]
        extra = [mode for mode in modes if not _reaches(case, tuple(case.required), (mode,))]
        # A sum too many is the mistake only if the gradient is right without it.
        if extra and not missing and case.backward_is_right is False:
            continue
        candidate = case.raw_sum(modes)
        fitted = case.fit(candidate) if missing or extra else None
        if fitted is None:
            continue

        # The usual divisors: the required one, those of the modes that were summed, none, and the number of ranks.
        exact = max(fitted[1], 1e-9)
        done = prod(case.required.get(mode, 1.0) for mode in modes)
        usual = [1 / case.divisor, 1 / done, 1.0, 1 / len(case.groups.joint(modes, case.wrong[0].rank))]
        factors = [x for x in usual if abs(x - fitted[0]) <= exact]
        factors += [x.value for x in near(fitted[0], case.sizes, exact)]
        if factors:
            residual = min(case.residual(candidate, factor) for factor in factors[:3])
            doubt = int(factors[0] not in usual)
            yield replace(_name_sum(case, modes, missing, extra), residual=residual, doubt=doubt)
        elif sum(part.value.numel() for part in case.wrong) >= 8:  # fewer numbers fit a factor by chance
            claim = _name_sum(case, modes, missing, extra)
            what = f"{claim.what}, and is {fitted[0]:.4g} times that"
            yield replace(claim, what=what, residual=case.residual(candidate, fitted[0]), doubt=2)


def _reaches(case: GradientCase, modes: Sequence[str], others: Sequence[str]) -> bool:
    return all(
        set(case.groups.joint(others, part.rank)) & set(case.raws) <= set(case.groups.joint(modes, part.rank))
        for part in case.wrong
    )


def _name_sum(case: GradientCase, modes: Sequence[str], missing: Sequence[str], extra: Sequence[str]) -> Claim:
    required = " and ".join(case.required) or "no reduction"
    if extra and not missing and all(case.is_replicated(mode) for mode in extra):
        over = " and ".join(extra)
        what = f"is also summed over {over}, where no reduction is required"
        return Claim("summed-not-averaged", what, f"handlers that sum it over {over}", modes=tuple(extra))
    if extra:
        what = f"is the sum over {' and '.join(modes)}, but {required} is required"
        where = "the process group that its reduction uses"
        return Claim("reduced-over-other-mode", what, where, modes=tuple(missing))
    over = " and ".join(missing)
    own = "this rank's local gradient, " if not modes else ""
    return sum_not_made(case, missing, f"is {own}not reduced over {over}")


@hypothesis("gradient")
def with_another_parameter(case: GradientCase) -> Iterator[Claim]:
    """Mistake: gradients are summed by their index over ranks that store different parameters, such as pipeline stages.

    Signature: the sum with the n-th gradient of the other ranks.
    """
    if not case.raws or not case.wrong or case.reduction_is_right:
        return
    for modes in case.groups.subsets():

        def candidate(part: LocalValue, modes: tuple[str, ...] = modes) -> Tensor | None:
            total = torch.zeros(part.value.numel(), dtype=torch.float64)
            for rank in case.groups.joint(modes, part.rank):
                name = _counterpart(case, part.rank, rank)
                raws = {} if name is None else sum_of_passes(case.step.gradients[name].raw, case.raw_scale)
                raw = raws.get(rank)
                if raw is None or raw.value.numel() != len(total):
                    return None
                total += raw.value
            return total

        met = {
            _counterpart(case, part.rank, rank) for part in case.wrong for rank in case.groups.joint(modes, part.rank)
        }
        others = sorted(name for name in met if name is not None and name != case.name)
        fitted = case.fit(candidate) if others else None
        if fitted is None:
            continue
        within = max(fitted[1], 1e-9)
        if abs(fitted[0] - 1) > within and not near(fitted[0], case.sizes, within):
            continue
        residual = case.residual(candidate, fitted[0])
        ranks = sorted({rank for part in case.wrong for rank in case.groups.joint(modes, part.rank)})
        silent = [
            (name, rank)
            for name in sorted({case.name, *others})
            for rank in ranks
            if any(part.rank == rank for part in case.step.weights[name].found)
            and not any(part.rank == rank for some in case.step.gradients[name].raw for part in some)
        ]
        if silent:
            # The rank stores the parameter, but its batch has not used it.
            name, rank = silent[0]
            what = f"is summed over {' and '.join(modes)} with the gradient of another parameter"
            where = f"how gradients are packed for the reduction, in which it is added to {others[0]}: rank {rank} has no gradient of {name}, and the later ones take its place"
            yield Claim(
                "gradients-exchanged", what, where, modes=tuple(case.required), residual=residual, is_local=True
            )
            continue
        what = f"is summed over {' and '.join(modes)}, some of whose ranks store a different parameter at its place"
        where = f"the process group of its reduction, in which it is added to {others[0]}"
        yield Claim("reduced-over-other-mode", what, where, modes=tuple(case.required), residual=residual)


def _counterpart(case: GradientCase, rank: int, other: int) -> str | None:
    """The parameter of another rank that has this parameter's number among those with a gradient."""
    stored = [
        [
            name
            for name, gradient in case.step.gradients.items()
            if any(part.rank == owner for some in gradient.raw for part in some)
        ]
        for owner in (rank, other)
    ]
    at = stored[0].index(case.name) if case.name in stored[0] else len(stored[1])
    return stored[1][at] if at < len(stored[1]) else None


@hypothesis("gradient")
def parts_that_add_up(case: GradientCase) -> Iterator[Claim]:
    """Mistake: a required sum or mean that no placement declares, or that a layer should make in its backward pass.

    Signature: the ranks' values for the same elements add up to the truth, or their mean is the truth.
    """
    if len(case.wrong) < 2 or len({part.value.numel() for part in case.wrong}) > 1:
        return
    for mode in [mode for mode in case.groups.of_mode if not case.raws or mode not in case.required]:
        sums, means = list[float](), list[float]()
        for part in case.wrong:
            ranks, truth = case.groups.joint((mode,), part.rank), case.truth(part)
            some = [flat(other.value) for other in case.compared.found if other.rank in ranks]
            if truth is None or len(some) < 2 or any(len(x) != len(truth) for x in some):
                break
            sums.append(length(torch.stack(some).sum(0) - truth))
            means.append(length(torch.stack(some).mean(0) - truth))
        if len(sums) < len(case.wrong):
            continue
        # Ranks that take the mean over their own tokens have gradients of the full size.
        what = f"is that of this rank's part of the batch: the mean over the ranks of {mode} is the true gradient, and nothing takes it"
        where = f"the process group in which gradients are averaged: it must include {mode}"
        residual = max(means) / (case.row.tolerance or 1.0)
        if mode not in case.required and any(
            length(flat(part.value) - flat(case.wrong[0].value)) > case.row.tolerance for part in case.wrong
        ):
            yield Claim("not-reduced", what, where, None, (mode,), residual)
        residual = max(sums) / (case.row.tolerance or 1.0)
        tied = bool(case.info.tied) or "PIPELINE" in mode.upper()
        what = f"is partial: the values of the ranks of {mode} add up to the true gradient, and nothing sums them"
        where = f"its placement, which should declare a sum over {mode}, or the layer that should make that sum"
        yield Claim("tied-copy-missed" if tied else "partial-gradient", what, where, None, (mode,), residual)


@hypothesis("gradient")
def lost_on_the_way_down(case: GradientCase) -> Iterator[Claim]:
    """Mistake: a backward pass between the loss and this parameter is wrong.

    Signature: none; found by elimination. Forward pass and loss are right, all required reductions are made, and the
    gradient is wrong.
    """
    if case.backward_is_right is not False or not case.reduction_is_right or not case.forward_is_right:
        return
    # A gradient that is too small, and whose local gradients differ between ranks of a model-parallel mode, lacks the part
    # that should have crossed those ranks.
    fitted, others = case.fit(case.truth), [m for m in case.groups.of_mode if m != "DATA" and case.differs_over(m)]
    after = f", while the gradient of {sorted(case.healthy)[0]} is right" if case.healthy else ""
    how = "is correctly reduced, but wrong because the backward passes of the ranks give wrong local gradients"
    # Ranks with the same data and all of a parameter must have equal local gradients, unless a sum over them is required.
    unlike = [mode for mode in others if mode not in case.required and case.is_replicated(mode)]
    unlike = unlike if len(case.wrong) == len(case.compared.found) else []
    if unlike or (fitted is not None and fitted[0] < 1 and others):
        over = " and ".join(unlike or others)
        what = f"{how}{after}: a contribution that crosses ranks of {over} is lost"
        where = f"the backward pass of whatever gathers or sends over {over}: it must sum"
        rank = 70 if unlike else 90
        yield Claim("partial-gradient", what, where, modes=tuple(unlike or others), residual=0.9, rank=rank)
    else:
        where = _BY_HAND if case.healthy else "the backward pass of the loss"
        yield Claim("backward-differs", f"{how}{after}", where, residual=0.9, rank=90, is_upstream=True)

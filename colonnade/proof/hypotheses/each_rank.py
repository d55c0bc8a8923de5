"""Changes of each rank's local gradient before the reduction: clipped, rounded, sparsified, delayed, or replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, product

import torch
from torch import Tensor

from colonnade.proof.case import Candidate, GradientCase, digits, either, near, same_places, sum_of_passes
from colonnade.proof.claims import Claim, hypothesis
from colonnade.proof.compare import LocalValue, at_positions, flat, length

_FEW = 4
"""Every subset of ranks is tried up to this many ranks."""
_LAST = 82
"""The rank of claims that come after every claim that explains more."""


def summed(case: GradientCase, change: Callable[[Tensor], Tensor]) -> Candidate:
    """Return the candidate "`change` is applied to each local gradient, and the results are reduced as required"."""
    return together(case, lambda rows: torch.stack([change(row) for row in rows]).sum(0) / case.divisor)


def together(case: GradientCase, join: Callable[[Tensor], Tensor | None]) -> Candidate:
    """Return the candidate "`join` reduces the local gradients of all required ranks".

    `join` gets these gradients stacked, one rank per row.
    """

    def candidate(part: LocalValue) -> Tensor | None:
        rows = case.required_raws(part)
        return None if rows is None or len(rows) < 2 else join(rows)

    return candidate


def _is_summed_wrongly(case: GradientCase) -> bool:
    """Whether a reduction is required, and its result is wrong."""
    return bool(case.raws and case.required and case.wrong) and not case.reduction_is_right


@hypothesis("gradient")
def another_operation(case: GradientCase) -> Iterator[Claim]:
    """Mistake: gradients are reduced by another operation than a sum, or only their signs are summed.

    Signature: the element-wise maximum, minimum or product of the local gradients, or the sum of their signs.
    """
    if not _is_summed_wrongly(case):
        return
    over, where = " and ".join(case.required), "the operation (ReduceOp) of the reduction"
    operations: dict[str, Callable[..., Tensor]] = {
        "maximum": torch.amax,
        "minimum": torch.amin,
        "product": torch.prod,
    }
    for word, operation in operations.items():
        residual = case.residual(together(case, partial(operation, dim=0)))
        what = f"is the element-wise {word} of the gradients over {over} instead of their sum"
        yield Claim("wrong-operation", what, where, residual=residual)

    def signs(rows: Tensor, by: float) -> Tensor:
        return rows.sign().sum(0) / by

    for word, divisor in (("sum", 1.0), ("mean", case.divisor)):
        residual = case.residual(together(case, partial(signs, by=divisor)))
        what = f"is the {word} of the signs of the gradients over {over} instead of the gradients"
        yield Claim("wrong-operation", what, "the values that each rank sends", residual=residual)


@hypothesis("gradient")
def mean_of_those_who_have_it(case: GradientCase) -> Iterator[Claim]:
    """Mistake: rows of a sparse gradient (an embedding) are divided by the number of ranks that used them.

    Signature: element by element, the mean over the ranks whose local gradient is not zero there.
    """
    if not _is_summed_wrongly(case):
        return

    def mean(rows: Tensor) -> Tensor | None:
        used = (rows != 0).sum(0)
        return None if bool((used == len(rows)).all()) else rows.sum(0) / used.clamp(min=1)

    over = " and ".join(case.required)
    what = f"is, element by element, the mean over the ranks of {over} where it is not zero instead of over all of them"
    where = "the divisor for the rows of a sparse gradient"
    yield Claim("wrong-divisor", what, where, modes=tuple(case.required), residual=case.residual(together(case, mean)))


@hypothesis("gradient")
def clipped_by_value(case: GradientCase) -> Iterator[Claim]:
    """Mistake: each rank clips the elements of its local gradient (clip by value) before the reduction.

    Signature: the sum of gradients that are clamped at one limit. The limit is inferred from the elements with the
    largest error.
    """
    rows = case.required_raws(case.wrong[0]) if _is_summed_wrongly(case) else None
    if rows is None:
        return
    found = flat(case.wrong[0].value) * case.divisor
    worst = (rows.sum(0) - found).abs().argsort(descending=True)[:_TRIED].tolist()
    limits = {f"{limit:.4g}": limit for at in worst for limit in _limits(rows[:, at], float(found[at]))}
    for shown, limit in limits.items() if found.any() else ():
        what = f"is the sum of local gradients whose elements were clipped to {shown} before the reduction"
        residual = case.residual(summed(case, partial(torch.clamp, min=-limit, max=limit)))
        yield Claim("clipped-before-reduced", what, _ORDER, residual=residual)


def _limits(column: Tensor, found: float) -> Iterator[float]:
    """The limits with which these numbers have this sum, if it clamps the largest of them, the largest two, and so on."""
    column = column[column.abs().argsort(descending=True)]
    for count in range(1, len(column) + 1):
        if signs := float(column[:count].sign().sum()):
            yield abs((found - float(column[count:].sum())) / signs)


_TRIED = 4
_ORDER = "the order of clipping and gradient handlers"


@hypothesis("gradient")
def clipped_first(case: GradientCase) -> Iterator[Claim]:
    """Mistake: each rank clips its local gradient by its own norm before the reduction.

    Signature: the sum with the clip coefficients of local norms. The norm is that of all passes, of each pass, or of
    the sum so far.
    """
    if case.evidence.max_norm is None or not _is_summed_wrongly(case):
        return
    most = case.evidence.max_norm

    # By rank: the local gradients of all parameters, in each pass.
    passes: dict[int, list[_Gradient]] = {}
    count = max((len(gradient.raw) for gradient in case.step.gradients.values()), default=0)
    for name, gradient in case.step.gradients.items():
        for number, some in enumerate(gradient.raw):
            for part in some:
                by_pass = passes.setdefault(part.rank, [{} for _ in range(count)])
                by_pass[number][name] = flat(part.value) * case.raw_scale

    # A script with its own clipping may reduce the clipped gradients, and step with the result.
    seen = case.gradient.clipped
    stepped = None if seen is None else replace(case, compared=seen)
    for whose, scale in (("its own", 1.0), ("its own divided", 1 / case.divisor)):
        once = {rank: [_coefficient(_sum(own), most, scale)] * len(own) for rank, own in passes.items()}
        ways = {f"by {whose} norm": once}
        if any(len(own) > 1 for own in passes.values()):
            each = {rank: [_coefficient(gradient, most, scale) for gradient in own] for rank, own in passes.items()}
            after: dict[int, list[float]] = {}
            for rank, own in passes.items():  # after each pass, the sum of all passes so far is clipped
                weights = after[rank] = list[float]()
                for number in range(1, len(own) + 1):
                    weights.append(1.0)
                    factor = _coefficient(_sum(own[:number], weights), most, scale)
                    weights[:] = [weight * factor for weight in weights]
            ways |= {f"in each micro-batch by {whose} norm": each, f"after each micro-batch by {whose} norm": after}
        for how, by_rank in ways.items():
            what = f"is the sum of local gradients that each rank clipped {how} before the reduction"
            residual = case.residual(_weighed(case, by_rank))
            yield Claim("clipped-before-reduced", what, _ORDER, residual=residual)
            if stepped is not None:
                what = f"is clipped on each rank {how}, and reduced only afterwards"
                residual = stepped.residual(_weighed(stepped, by_rank))
                yield Claim("clipped-before-reduced", what, _ORDER, residual=residual, rank=1)


_Gradient = dict[str, Tensor]


def _sum(some: Sequence[_Gradient], weights: Sequence[float] | None = None) -> _Gradient:
    total: _Gradient = {}
    for weight, gradient in zip(weights or [1.0] * len(some), some, strict=True):
        for name, value in gradient.items():
            total[name] = total[name] + weight * value if name in total else weight * value
    return total


def _coefficient(gradient: _Gradient, most: float, scale: float) -> float:
    norm = sum(length(value) ** 2 for value in gradient.values()) ** 0.5
    return min(1.0, most / (norm * scale + 1e-6))


def _weighed(case: GradientCase, weights: dict[int, list[float]]) -> Candidate:
    def candidate(part: LocalValue) -> Tensor | None:
        total = None
        for number, some in enumerate(case.gradient.raw):
            one_pass = case.of_pass(some)
            for rank in case.groups.joint(tuple(case.required), part.rank):
                raw = one_pass.raw_at(rank, part) if rank in one_pass.raws else None
                if raw is not None:
                    total = raw * weights[rank][number] + (0.0 if total is None else total)
        return None if total is None else total / case.divisor

    return candidate


@hypothesis("gradient")
def whole_numbers(case: GradientCase) -> Iterator[Claim]:
    """Mistake: gradients are quantized to integers of 8 or 4 bits without error feedback.

    Signature: the sum of gradients that are rounded to multiples of each rank's largest element / the largest integer.
    """

    def quantized(row: Tensor, levels: int) -> Tensor:
        unit = row.abs().max() / levels
        return (row / unit).round() * unit if unit else row

    # Quantization uses the largest integer, or one more (the negative end of the range), as the largest element.
    for bits in (8, 4) if _is_summed_wrongly(case) else ():
        for levels in (2 ** (bits - 1) - 1, 2 ** (bits - 1)):
            residual = case.residual(summed(case, partial(quantized, levels=levels)))
            what = f"is the sum of gradients that were rounded to {bits} bits"
            where = "the type in which gradients are sent, and whether the rounding error is added to the next step"
            yield Claim("rounded", what, where, residual=residual)


@hypothesis("gradient")
def rounded_first(case: GradientCase) -> Iterator[Claim]:
    """Mistake: each rank's gradient is computed or sent in a narrower dtype than that of the run.

    Signature: the sum of local gradients that are rounded to that dtype, after all passes or in each pass.
    """
    if not _is_summed_wrongly(case):
        return

    def cast(values: Tensor, dtype: torch.dtype) -> Tensor:
        return values.to(dtype).double()

    own = torch.finfo(getattr(torch, case.evidence.dtype)).eps
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if torch.finfo(dtype).eps <= 4 * own:
            continue
        each = [[replace(part, value=cast(part.value, dtype)) for part in some] for some in case.gradient.raw]
        of_passes = replace(case, gradient=replace(case.gradient, raw=each))
        ways = {"": case.residual(summed(case, partial(cast, dtype=dtype)))}
        if len(each) > 1:
            ways[" in each micro-batch"] = case.residual(of_passes.due)
        for when, residual in ways.items():
            what = f"is the sum of local gradients that are rounded to {str(dtype).removeprefix('torch.')}{when}"
            where = "the dtype in which each rank computes and sends its gradient"
            yield Claim("rounded", what, where, residual=residual)


@hypothesis("gradient")
def of_some_something_else(case: GradientCase) -> Iterator[Claim]:
    """Mistake: some ranks send the gradient of the previous step or of another parameter, instead of theirs or added.

    Signature: the sum with these gradients. In small groups, every subset of ranks is tried.
    """
    ranks = case.groups.joint(tuple(case.required), case.wrong[0].rank) if _is_summed_wrongly(case) else ()
    if not 1 < len(ranks) <= _FEW:
        return
    subsets = [some for count in range(1, len(ranks)) for some in combinations(ranks, count)]

    # (cause, whose gradient, where to look, a case with those local gradients)
    sources: list[tuple[str, str, str, GradientCase]] = []
    before = case.evidence.steps[case.at - 1].gradients.get(case.name) if case.at else None
    if before is not None:
        old = case.of_pass(list(sum_of_passes(before.raw).values()))
        where = "when these ranks send, and the events that they wait for"
        sources.append(("stale-gradient", "the gradient of the previous step", where, old))
    size = case.compared.truth.numel()
    names = [
        name for name, gradient in case.step.gradients.items() if gradient.raw and gradient.total.truth.numel() == size
    ]
    for name in [name for name in names if name != case.name][:_FEW]:
        exchanged = case.of_pass(list(sum_of_passes(case.step.gradients[name].raw).values()))
        where = "when these ranks send, and everything that writes to the buffer meanwhile"
        sources.append(("gradients-exchanged", f"the gradient of {name}", where, exchanged))

    for (cause, whose, where, other), some, added in product(sources, subsets, (False, True)):

        def candidate(
            part: LocalValue, other: GradientCase = other, some: tuple[int, ...] = some, added: bool = added
        ) -> Tensor | None:
            sent = [(other if rank in some else case).raw_at(rank, part) for rank in ranks]
            sent += [case.raw_at(rank, part) for rank in some if added]
            return None if any(raw is None for raw in sent) else torch.stack(sent).sum(0) / case.divisor  # type: ignore[arg-type]

        how = "in addition to their own" if added else "instead of their own"
        what = f"has {whose} from ranks {list(some)} in its sum, {how}"
        yield Claim(cause, what, where, residual=case.residual(candidate))

    # Ranks that start their reductions in different orders sum different parameters, and each rank has other sums.
    if len(case.wrong) < 2:
        return
    for name in [name for name in names if name != case.name][:_FEW]:
        exchanged = case.of_pass(list(sum_of_passes(case.step.gradients[name].raw).values()))

        def nearest(part: LocalValue, exchanged: GradientCase = exchanged) -> Tensor | None:
            sums = []
            for some in subsets:
                sent = [(exchanged if rank in some else case).raw_at(rank, part) for rank in ranks]
                if any(raw is None for raw in sent):
                    return None
                sums.append(torch.stack(sent).sum(0) / case.divisor)  # type: ignore[arg-type]
            return min(sums, key=lambda value: length(value - flat(part.value)))

        pair = " and ".join(sorted((case.name, name)))
        what = f"is reduced together with another parameter of its shape: {pair} are mixed, on each rank from different ranks"
        where = "the order in which each rank starts its reductions"
        yield Claim("gradients-exchanged", what, where, residual=case.residual(nearest), rank=40)


@hypothesis("gradient")
def weights_inside(case: GradientCase) -> Iterator[Claim]:
    """Mistake: weight decay (or a similar term) is added to the gradient before the reduction.

    Signature: the truth plus a constant times the weight.
    """
    start = case.evidence.steps[case.at - 1].weights if case.at else case.evidence.weights_at_start
    if case.name not in start or not case.wrong:
        return
    weight = case.moved_to(start[case.name].truth)
    part = case.wrong[0]
    truth, values = case.truth(part), weight(part)
    if truth is None or values is None or not bool(values.any()) or len(values) < 2:
        return
    factor = float((flat(part.value) - truth) @ values) / float(values @ values)

    def candidate(part: LocalValue) -> Tensor | None:
        gradient, decay = case.truth(part), weight(part)
        return None if gradient is None or decay is None else gradient + factor * decay

    what = f"has {factor:.4g} times the weight added to it"
    where = "code that adds weight decay to gradients, in addition to the optimizer's own"
    if abs(factor - 1) <= 1e-6:
        where += ", and at a gradient buffer that is not zeroed after it held the weights"
    yield Claim("weights-in-gradient", what, where, factor, residual=case.residual(candidate))


@hypothesis("gradient")
def thinned_out(case: GradientCase) -> Iterator[Claim]:
    """Mistake: ranks send only their largest elements.

    Signature: each element is the sum over some of the ranks, and these ranks vary between elements.
    """
    if not _is_summed_wrongly(case):
        return

    def candidate(part: LocalValue) -> Tensor | None:
        rows = case.required_raws(part)
        if rows is None or not 1 < len(rows) <= _FEW:
            return None
        found = flat(part.value)
        chosen = torch.tensor(list(product((0.0, 1.0), repeat=len(rows))), dtype=torch.float64)
        # For each element, the sum over the subset of ranks that comes closest to the found value.
        sums = chosen @ rows / case.divisor
        return sums.gather(0, (sums - found).abs().argmin(0, keepdim=True)).squeeze(0)

    # What a rank sends arrives on every rank alike. A sum that is read too early differs between ranks.
    values: dict[int, Tensor] = {part.rank: flat(part.value) for part in case.wrong}
    first = case.wrong[0]
    replicas = [part for part in case.wrong if same_places(part, first)]
    if all(length(values[part.rank] - values[first.rank]) <= case.row.tolerance for part in replicas):
        what = "sums each element over some of the ranks only, and these ranks vary between elements"
        where = "the elements that each rank sends (the largest ones, for example), and whether the others are kept for the next step"
        yield Claim("missing-gradient", what, where, residual=case.residual(candidate), rank=_LAST)
    else:
        what = "sums each element over some of the ranks only, and these vary between elements and between replicas"
        where = "whether the step waits for its reductions (wait() of async_op=True, synchronization of streams)"
        yield Claim("not-reduced", what, where, residual=case.residual(candidate), rank=_LAST - 3)


@hypothesis("gradient")
def own_factor(case: GradientCase) -> Iterator[Claim]:
    """Mistake: each rank scales or clips its shards by a factor that differs between ranks.

    Signature: the shards of a rank are the true ones times one factor for each rank.
    """
    # The factors are read off the largest differing gradient, because a few elements fit any factor.
    others = [name for name in case.step.gradients if name not in case.healthy]
    largest = case.step.gradients[max(others, key=lambda name: case.step.gradients[name].total.truth.numel())].total
    factors: dict[int, float] = {}
    for part in largest.found:
        truth = at_positions(largest.truth, part.positions)
        if part.positions is None or len(truth) != part.value.numel() or not bool(truth.any()):
            return
        factors[part.rank] = float(flat(part.value) @ truth) / float(truth @ truth)
    # A rank with zeros has no gradient. Replicas with unlike factors differ for another reason.
    most, least = max(factors.values(), default=1.0), min(factors.values(), default=1.0)
    if most - least <= 1e-6 * abs(most) or least <= 1e-3 or any(part.positions is None for part in case.wrong):
        return

    def candidate(part: LocalValue) -> Tensor | None:
        truth = case.truth(part)
        return None if truth is None or part.rank not in factors else factors[part.rank] * truth

    # A clip makes the norm of what each rank clips the limit.
    norms: dict[int, float] = {}
    for gradient in case.step.gradients.values():
        for part in gradient.total.found:
            norms[part.rank] = norms.get(part.rank, 0.0) + length(part.value) ** 2
    sizes = [norms.get(rank, 0.0) ** 0.5 for rank in factors]
    shown = ", ".join(f"{factor:.4g} on rank {rank}" for rank, factor in list(factors.items())[:4])
    residual = case.residual(candidate)
    if max(sizes) - min(sizes) <= 1e-3 * max(sizes):
        what = f"is multiplied on each rank by a factor of its own ({shown}), and then the shards of each rank have the norm {sizes[0]:.4g}"
        where = "the norm by which each rank clips its own shards: its squares must be summed over all ranks"
        yield Claim("norm-misses-shards", what, where, residual=residual, is_local=True)
    else:
        what = f"is multiplied on each rank by a factor of its own: {shown}"
        yield Claim(
            "wrong-divisor", what, "what each rank multiplies its own shards by", residual=residual, is_local=True
        )


@hypothesis("gradient")
def scaled_with_more_in_it(case: GradientCase) -> Iterator[Claim]:
    """Mistake: a backward pass or a hook scales the local gradient, and the script later adds a term to the gradient.

    Signature: the local gradients are a multiple of those of the reference, and the final gradient contains the
    difference.
    """
    factor = case.local_factor
    if factor is None or abs(factor - 1) <= 1e-6:
        return
    passes = torch.stack([flat(x) for x in case.gradient.truth_of_passes]).sum(0)
    more = length(flat(case.compared.truth) - passes)
    if more <= case.row.tolerance or len(passes) != case.compared.truth.numel():
        return

    def candidate(part: LocalValue) -> Tensor | None:
        truth = case.truth(part)
        return None if truth is None else truth + (factor - 1) * at_positions(passes, part.positions)

    names = near(factor, case.sizes, 1e-6)
    after = f", while the gradient of {sorted(case.healthy)[0]} is right" if case.healthy else ""
    what = f"is {digits(factor)} times what it should be{either(names)} before any reduction{after}"
    where = "hooks on it, and custom backward passes between it and the parameters whose gradients are right"
    cause = "scaled-by-mode" if names else "backward-differs"
    yield Claim(cause, what, where, factor, residual=case.residual(candidate), is_local=True)

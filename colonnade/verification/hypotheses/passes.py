"""A gradient that lacks a micro-batch, has one twice, or weighs shares of the batch wrongly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from colonnade.verification.compare import flat
from colonnade.verification.evidence import Part
from colonnade.verification.hypotheses.case import GradientCase
from colonnade.verification.hypotheses.table import Claim, hypothesis
from colonnade.verification.tolerance import length


@hypothesis("gradient")
def micro_batches(case: GradientCase) -> Iterator[Claim]:
    """Whole-number weights of the passes that are not all one."""
    truths = [flat(one) for one in case.gradient.truth_of_passes]
    count = len(truths)
    if count < 2 or any(len(one) != case.compared.truth.numel() for one in truths):
        return
    ways = [*_ways(count), *_scaled_again(count), *_summed_again(count, case.groups.sizes)]
    for weights, cause, what, where in ways:
        for scale in sorted({1.0, float(count), 1 / count, count / max(sum(weights), 1)}):
            residual = case.residual(_mixture(truths, [scale * one for one in weights]))
            yield Claim(cause, what, where, residual=residual)


def _ways(count: int) -> Iterator[tuple[list[float], str, str, str]]:
    """(weights, cause, what, where) of the usual mistakes; the last pass alone first."""
    where = "which pass starts the sums, and what clears gradients between passes"
    for only in [count - 1, *range(count - 1)]:
        weights = [float(one == only) for one in range(count)]
        if only == count - 1:
            yield weights, "last-micro-batch-only", f"is that of the last of {count} micro-batches only", where
        elif count > 2:
            yield weights, "micro-batch-missing", f"is that of micro-batch {only} of {count} only", where
    for one in range(count):
        left = [float(other != one) for other in range(count)]
        twice = [1.0 + (other == one) for other in range(count)]
        yield left, "micro-batch-missing", f"lacks micro-batch {one} of {count}", where
        again = f"has micro-batch {one} of {count} twice"
        yield twice, "micro-batch-twice", again, "what is summed over ranks more than once between passes"
        instead = [1.0 + (other == one) - (other == (one + 1) % count) for other in range(count)]
        if count > 1 and min(instead) == 0:
            what = f"{again}, in place of micro-batch {(one + 1) % count}"
            yield instead, "micro-batch-twice", what, "the loader's index of micro-batches"


def _scaled_again(count: int) -> Iterator[tuple[list[float], str, str, str]]:
    """Each pass scales all that is accumulated so far."""
    if count > 2:  # of two passes it cannot be told from other weights
        weights = [float(count) ** -(count - 1 - at) for at in range(count)]
        what = f"has earlier micro-batches divided by {count} again with each later one"
        yield weights, "scaled-by-accumulation", what, "what scales gradients between passes"


def _summed_again(count: int, sizes: Mapping[str, int]) -> Iterator[tuple[list[float], str, str, str]]:
    """Each pass sums over a mode all that is accumulated so far: earlier passes are multiplied again and again."""
    for mode, size in sizes.items():
        weights = [float(size ** (count - 1 - at)) for at in range(count)]
        what = f"has earlier micro-batches summed over {mode} again with each later one"
        yield weights, "micro-batch-twice", what, "whether each pass reduces all that is accumulated so far"


def _mixture(truths: Sequence[Tensor], weights: Sequence[float]) -> Callable[[Part], Tensor]:
    whole = torch.stack([weight * one for weight, one in zip(weights, truths, strict=True)]).sum(0)

    def candidate(part: Part) -> Tensor:
        return whole if part.positions is None else whole[part.positions.flatten()]

    return candidate


@hypothesis("gradient")
def mean_of_means(case: GradientCase) -> Iterator[Claim]:
    """Each share of the batch counts the same, though some have more tokens than others."""
    truths = [flat(one) for one in case.gradient.truth_of_shards]
    if len(truths) < 2 or any(len(one) != case.compared.truth.numel() for one in truths):
        return
    if length(torch.stack(truths).mean(0) - flat(case.compared.truth)) <= case.row.tolerance:
        return  # the shares weigh the same: their plain mean is right
    residual = case.residual(_mixture(truths, [1 / len(truths)] * len(truths)))
    what = "is the plain mean of the means of all shares of the batch, which have different counts"
    where = "the loss: give (sum, count), and divide once by the count of the whole batch"
    yield Claim("mean-of-means", what, where, residual=residual)


@hypothesis("gradient")
def means_of_passes_and_ranks(case: GradientCase) -> Iterator[Claim]:
    """Every rank's every pass counts the same; other weights, one for each of them, would give the truth."""
    weights = _better_weights(case)
    if weights is None:
        return
    own = _contributions(case, case.name)
    if own is None or len(own) != len(weights):
        return
    truth = flat(case.compared.truth)
    residual = length((torch.stack(own) * weights[:, None]).sum(0) - truth) / (case.row.tolerance or 1.0)
    told = ", ".join(f"{weight:.3g}" for weight in weights[:4].tolist()) + (", ..." if len(weights) > 4 else "")
    what = f"has means of unlike counts in it with equal weight: the passes of the ranks should weigh {told} times that"
    where = "the loss: give (sum, count), and divide once by the count of the whole batch"
    yield Claim("mean-of-means", what, where, residual=0.3 * residual)


_SAMPLED = 1 << 16


def _better_weights(case: GradientCase) -> Tensor | None:
    """By which the raw gradients of each pass and rank make the truth, read off the largest gradient that they fit.

    They are as many in all as there are passes, as parts of a count are, and not all one.
    """
    if case.reduction_is_right is not True:
        return None
    largest = sorted(case.step.gradients, key=lambda name: -case.step.gradients[name].total.truth.numel())
    for name in largest[:8]:
        own, truth = _contributions(case, name), flat(case.step.gradients[name].total.truth)
        if own is None or len(own) < 2 or len(truth) < 3 * len(own) or not truth.any():
            continue
        stride = -(-len(truth) // _SAMPLED)
        columns, wanted = torch.stack(own, 1)[::stride], truth[::stride]
        weights = torch.linalg.lstsq(columns, wanted[:, None]).solution.flatten()
        left = length(columns @ weights - wanted) / length(wanted)
        whole = abs(float(weights.sum()) - len(own)) < 1e-3 * len(own)
        if left < 1e-3 and whole and bool((weights > -1e-3).all()) and length(weights - 1) > 1e-3:
            return weights
    return None


def _contributions(case: GradientCase, name: str) -> list[Tensor] | None:
    """What each pass of each rank that sees distinct data gives to a gradient, if all hold all of it."""
    gradient, info = case.step.gradients[name], case.evidence.parameters.get(name)
    modes = tuple(case.groups.name(mode) for mode, _, _ in info.owed) if info is not None else ()
    if not gradient.raw or not gradient.raw[0]:
        return None
    ranks, divisor = case.groups.joint(modes, gradient.raw[0][0].rank), 1.0
    for _, _, by in info.owed if info is not None else ():
        divisor *= by
    found = []
    for some in gradient.raw:
        for part in some:
            if part.rank in ranks:
                if part.value.numel() != gradient.total.truth.numel():
                    return None
                found.append(flat(part.value) * case.raw_scale / divisor)
    return found


@hypothesis("gradient")
def shares_of_the_batch(case: GradientCase) -> Iterator[Claim]:
    """One share of the batch instead of all of it, with no raw gradients to tell by."""
    truths = [flat(one) for one in case.gradient.truth_of_shards]
    if case.raws or len(truths) < 2 or not case.wrong:
        return
    mode = " and ".join(case.groups.distinct) or "the ranks"
    for scale in (1.0, 1 / len(truths)):
        best = [
            min(_apart(case, part, scale * truth) for truth in truths)
            for part in case.wrong
            if all(len(truth) == case.compared.truth.numel() for truth in truths)
        ]
        if best:
            what = f"is that of one share of the batch: not reduced over {mode}"
            yield Claim("not-reduced", what, f"who sums it over {mode}", None, case.groups.distinct, max(best))


def _apart(case: GradientCase, part: Part, whole: Tensor) -> float:
    wanted = whole if part.positions is None else whole[part.positions.flatten()]
    if wanted.numel() != part.value.numel():
        return float("inf")
    return length(flat(part.value) - wanted) / (case.row.tolerance or 1.0)

"""A gradient that gives parts of the global batch wrong weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from colonnade.proof.case import GradientCase
from colonnade.proof.claims import Claim, hypothesis
from colonnade.proof.compare import LocalValue, at_positions, flat, length
from colonnade.proof.hypotheses.mixtures import ODD, mixture, similar, solved


@hypothesis("gradient")
def mean_of_means(case: GradientCase) -> Iterator[Claim]:
    """Mistake: the batch of each data rank counts the same, although some have more tokens.

    Signature: the plain mean of the gradients of these batches.
    """
    truths = [flat(x) for x in case.gradient.truth_of_data_ranks]
    if len(truths) < 2 or any(len(x) != case.compared.truth.numel() for x in truths):
        return
    if length(torch.stack(truths).mean(0) - flat(case.compared.truth)) <= case.row.tolerance:
        return  # all counts are equal, so the plain mean is right
    residual = case.residual(mixture(truths, [1 / len(truths)] * len(truths)))
    what = "is the unweighted mean over the data ranks, whose batches have different token counts"
    where = "the loss: give (sum, count), and divide once by the count of the whole batch"
    yield Claim("mean-of-means", what, where, residual=residual)


@hypothesis("gradient")
def means_of_passes_and_ranks(case: GradientCase) -> Iterator[Claim]:
    """Mistake: each pass of each rank counts the same, although some have more tokens.

    Signature: other weights of the passes and ranks, solved for, would give the truth.
    """
    if case.reduction_is_right is not True:
        return
    # The weights are read off the largest gradient that they fit. Token counts are parts of a total, so the weights must add
    # up to the number of passes and must not be negative.
    weights: Tensor | None = None
    largest = sorted(case.step.gradients, key=lambda name: -case.step.gradients[name].total.truth.numel())
    for name in largest[:8]:
        own, truth = _contributions(case, name), flat(case.step.gradients[name].total.truth)
        solution = solved(own, truth, 1e-3 * length(truth)) if own is not None and len(own) > 1 else None
        if own is None or solution is None:
            continue
        found = torch.tensor(solution, dtype=torch.float64)
        adds_up = abs(float(found.sum()) - len(own)) < 1e-3 * len(own)
        if adds_up and bool((found > -1e-3).all()) and length(found - 1) > 1e-3:
            weights = found
            break
    if weights is None:
        return
    own = _contributions(case, case.name)
    if own is None or len(own) != len(weights):
        return
    truth = flat(case.compared.truth)
    residual = length((torch.stack(own) * weights[:, None]).sum(0) - truth) / (case.row.tolerance or 1.0)
    shown = ", ".join(f"{weight:.3g}" for weight in weights[:4].tolist()) + (", ..." if len(weights) > 4 else "")
    what = (
        f"averages means over different token counts with equal weights: the passes of the ranks should weigh {shown}"
    )
    where = "the loss: give (sum, count), and divide once by the count of the whole batch"
    yield Claim("mean-of-means", what, where, residual=0.3 * residual)


def _contributions(case: GradientCase, name: str) -> list[Tensor] | None:
    """The contribution of each pass of each data rank to a gradient, if all these ranks have the full gradient."""
    gradient, info = case.step.gradients[name], case.evidence.parameters.get(name)
    modes = tuple(case.groups.name(mode) for mode, _, _ in info.required) if info is not None else ()
    if not gradient.raw or not gradient.raw[0]:
        return None
    ranks, divisor = case.groups.joint(modes, gradient.raw[0][0].rank), 1.0
    for _, _, by in info.required if info is not None else ():
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
def weights_of_shares(case: GradientCase) -> Iterator[Claim]:
    """Mistake: each rank divides its loss by a different number.

    Signature: the batches of the data ranks have other weights, solved for, than in the truth.
    """
    for like in similar(case):
        shares = [flat(x) for x in like.gradient.truth_of_data_ranks]
        if len(shares) < 2 or not like.wrong or any(len(x) != like.compared.truth.numel() for x in shares):
            continue
        part = like.wrong[0]
        columns = [at_positions(x, part.positions) for x in shares]
        # The weights in the truth are not 1 each if token counts differ, so the found weights are compared with those.
        due = solved(columns, at_positions(like.compared.truth, part.positions), like.row.tolerance)
        size = max(1.0, length(part.value) / (length(like.compared.truth) or 1.0))
        found = solved(columns, flat(part.value), like.row.tolerance * size)
        if due is None or found is None or min(due) <= 0:
            continue
        times = [x / other for x, other in zip(found, due, strict=True)]
        if max(times) - min(times) > 1e-3 and len(case.gradient.truth_of_data_ranks) == len(found):
            shown = ", ".join(f"{x:.4g}" for x in times[:6])
            what = f"counts the batches of the data ranks {shown} times, in this order"
            residual = case.residual(mixture(case.gradient.truth_of_data_ranks, found))
            yield Claim("wrong-divisor", what, "the divisor of each rank's loss", residual=residual, rank=ODD)
        return


@hypothesis("gradient")
def shares_of_the_batch(case: GradientCase) -> Iterator[Claim]:
    """Mistake: no reduction over the ranks that see distinct data.

    Signature: the gradient of one data rank's batch, or its term of the mean. For runs without local gradients.
    """
    truths = [flat(x) for x in case.gradient.truth_of_data_ranks]
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
            what = f"is that of a single data rank's batch: it is not reduced over {mode}"
            yield Claim(
                "not-reduced", what, f"the handler that sums it over {mode}", None, case.groups.distinct, max(best)
            )


def _apart(case: GradientCase, part: LocalValue, whole: Tensor) -> float:
    wanted = whole if part.positions is None else whole[part.positions.flatten()]
    if wanted.numel() != part.value.numel():
        return float("inf")
    return length(flat(part.value) - wanted) / (case.row.tolerance or 1.0)

"""A gradient as a weighted sum of the gradients of passes or ranks. In a healthy run every weight is 1.

The weights are solved for, not guessed, so every such mistake is seen; a hypothesis here only gives its pattern a name.
The last part is about batches with different token counts, whose means need unequal weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

import torch
from torch import Tensor

from colonnade.context.parallel_mode import ParallelMode
from colonnade.proof.case import Candidate, GradientCase, sum_of_passes
from colonnade.proof.claims import Claim, hypothesis, sum_not_made
from colonnade.proof.compare import LocalValue, at_positions, flat, length

_SAMPLED = 1 << 16
_OTHERS = 8
_SOME, _ODD = 40, 60
"""The ranks of claims that some contributions are missing, and of claims that the weights differ without a pattern."""


def solved(columns: Sequence[Tensor], value: Tensor, allowed: float) -> list[float] | None:
    """Solve for the weights with which the columns add up to a value; None unless exactly one set of weights does."""
    if not columns or len(value) < 3 * len(columns):
        return None
    stride = -(-len(value) // _SAMPLED)
    matrix, wanted = torch.stack(list(columns), 1)[::stride], value[::stride]
    sizes = matrix.norm(dim=0)
    # Columns that are zero or nearly linearly dependent have many solutions, of which least squares would give any.
    if not bool((sizes > 0).all()):
        return None
    spread = torch.linalg.svdvals(matrix / sizes)
    if float(spread[-1]) < 1e-4 * float(spread[0]):
        return None
    weights = torch.linalg.lstsq(matrix / sizes, wanted[:, None]).solution.flatten() / sizes
    return weights.tolist() if length(matrix @ weights - wanted) <= allowed else None


def mixture(wholes: Sequence[Tensor], weights: Sequence[float]) -> Candidate:
    """Return the candidate "weighted sum of these full tensors", read at the elements of each rank."""

    def candidate(part: LocalValue) -> Tensor:
        some = [w * at_positions(x, part.positions) for w, x in zip(weights, wholes, strict=True)]
        return torch.stack(some).sum(0)

    return candidate


def similar(case: GradientCase) -> Iterator[GradientCase]:
    """Yield the case and those of the largest other wrong gradients.

    The gradient of a small parameter may not determine the weights.
    """
    yield case
    size = length(case.compared.truth) or 1.0
    others = [name for name in case.step.gradients if name != case.name and name not in case.healthy]
    for name in sorted(others, key=lambda name: -case.step.gradients[name].total.truth.numel())[:_OTHERS]:
        gradient = case.step.gradients[name]
        row = replace(case.row, tolerance=case.row.tolerance * length(gradient.total.truth) / size)
        yield replace(case, name=name, gradient=gradient, compared=gradient.total, row=row)


# --- Passes ---


@dataclass(frozen=True)
class _Pattern:
    """The weights of the passes, and how exactly they are known."""

    weights: Sequence[float]
    within: float
    sizes: Mapping[str, int]

    def named(self) -> tuple[str, str, str] | None:
        """Return (cause, what, where) for the claim.

        Returns None if a weight is negative, or if all weights are equal (`wrong_factor` explains these).
        """
        weights, count = self.weights, len(self.weights)
        present = [at for at, weight in enumerate(weights) if weight > self.within]
        if not present or min(weights) < -self.within:
            return None
        least = min(weights[at] for at in present)
        more = [at for at in present if not self._same(weights[at], least)]
        lost = [at for at in range(count) if at not in present]
        between = "the pass that starts the reduction, and anything that clears gradients between passes"
        if not more and not lost:
            return None  # a plain factor: `wrong_factor`
        if present == [count - 1]:
            return "last-micro-batch-only", f"is that of the last of {count} micro-batches only", between
        if not more and len(present) == 1:
            return "micro-batch-missing", f"is that of micro-batch {present[0]} of {count} only", between
        if not more:
            return "micro-batch-missing", f"lacks micro-batch {_listed(lost)} of {count}", between

        # A geometric series: each pass does something to all that is accumulated so far.
        ratios = [] if lost else [a / b for a, b in pairwise(weights)]
        if ratios and all(self._same(ratio, ratios[0]) for ratio in ratios):
            for mode, size in self.sizes.items():
                if self._same(ratios[0], size):
                    what = f"has earlier micro-batches summed over {mode} again with each later one"
                    return "reduced-twice", what, "whether each pass reduces everything accumulated so far"
        usual = (1.0, float(count), 1 / count, count / (count + 1))
        if len(more) == 1 and self._same(weights[more[0]], 2 * least) and any(self._same(least, x) for x in usual):
            instead = f", instead of micro-batch {_listed(lost)}" if lost else ""
            what = f"counts micro-batch {more[0]} of {count} twice{instead}"
            return "micro-batch-twice", what, "the loader's index, and sums that are made more than once between passes"
        shown = ", ".join(f"{weight:.3g}" for weight in weights[:6])
        what = f"sums its micro-batches with the weights {shown} instead of 1 each"
        return "scaled-by-accumulation", what, "anything that scales gradients between passes, and in which passes"

    def _same(self, x: float, other: float) -> bool:
        return abs(x - other) <= 4 * self.within * max(1.0, abs(other))


@hypothesis("gradient")
def passes(case: GradientCase) -> Iterator[Claim]:
    """Mistake: a micro-batch is lost, counts twice, or is scaled.

    Signature: the gradient is a weighted sum of the passes, and the weights that solve for it are not all 1.
    """
    count = len(case.gradient.truth_of_passes)
    if count < 2:
        return
    for like in similar(case):
        truths = like.gradient.truth_of_passes
        if not like.wrong or any(x.numel() != like.compared.truth.numel() for x in truths):
            continue
        columns = [torch.cat([at_positions(x, part.positions) for part in like.wrong]) for x in truths]
        value = torch.cat([flat(part.value) for part in like.wrong])
        weights = solved(columns, value, 2 * like.row.tolerance * len(like.wrong) ** 0.5)
        if weights is None:
            continue
        # A script may clear gradients between its passes on purpose, and then no pass is lost.
        whole = torch.cat([at_positions(like.compared.truth, part.positions) for part in like.wrong])
        due = solved(columns, whole, 2 * like.row.tolerance * len(like.wrong) ** 0.5)
        if due is None or max(abs(weight - 1) for weight in due) > 1e-3:
            return
        within = max(1e-6, 4 * like.row.tolerance / min(map(length, columns)))
        # With two pipeline stages, ties that are summed in each pass give the weights 2 and 1. A pass that came twice gives
        # them too, and is likelier.
        sizes = {mode: size for mode, size in case.groups.sizes.items() if mode != ParallelMode.PIPELINE.name}
        pattern = _Pattern(weights, within, sizes).named()
        if pattern is not None and (again := _same_passes(case)):
            what = f"has micro-batch {again[0]} of {count} again instead of micro-batch {again[1]}"
            pattern = "micro-batch-twice", what, "the loader's index, and how a batch is sliced"
        if pattern is not None:
            residual = case.residual(mixture(case.gradient.truth_of_passes, weights))
            odd = pattern[0] == "scaled-by-accumulation"
            yield Claim(*pattern, residual=residual, rank=_ODD if odd else 0)
        return


def _same_passes(case: GradientCase) -> tuple[int, int] | None:
    """Two passes with the same local gradients on every rank, while those of the reference differ."""
    truths, raws = case.gradient.truth_of_passes, [sum_of_passes([some]) for some in case.gradient.raw]
    if len(raws) != len(truths):
        return None
    for x, other in combinations(range(len(raws)), 2):
        pairs = [(part.value, raws[other][rank].value) for rank, part in raws[x].items() if rank in raws[other]]
        same = bool(pairs) and all(length(mine) > 0 and torch.equal(mine, theirs) for mine, theirs in pairs)
        if same and length(flat(truths[x]) - flat(truths[other])) > case.row.tolerance:
            return x, other
    return None


# --- Ranks ---

_Weights = dict[tuple[int, ...], float]
"""By ranks that have the same local gradient: their weight in the sum, which should be 1 for each rank."""


@hypothesis("gradient")
def ranks(case: GradientCase) -> Iterator[Claim]:
    """Mistake: a rank is left out of the sum, or counts more than another.

    Signature: the gradient is a weighted sum of the ranks' local gradients, and the weights that solve for it are not
    all 1.
    """
    if not case.raws or not case.wrong or case.reduction_is_right:
        return
    weights = {part.rank: _weights(case, part) for part in case.wrong}
    known = {rank: found for rank, found in weights.items() if found is not None}
    if len(known) < len(weights):
        return

    def candidate(part: LocalValue) -> Tensor | None:
        some = [(case.raw_at(ranks[0], part), weight) for ranks, weight in known[part.rank].items()]
        if any(x is None for x, _ in some):
            return None
        return torch.stack([weight / case.divisor * x for x, weight in some if x is not None]).sum(0)

    lacking: dict[int, list[int]] = {}
    shown: dict[int, str] = {}
    for rank, by_ranks in known.items():
        required = set(case.groups.joint(tuple(case.required), rank))
        for some, weight in by_ranks.items():
            due = len(required & set(some))
            if due and abs(weight) < 1e-3:
                lacking.setdefault(rank, []).extend(sorted(required & set(some)))
            elif not due and abs(weight) > 1e-3:
                return  # reduced over other ranks than required: `over_other_ranks`
        shown[rank] = ", ".join(f"{w / (len(required & set(some)) or 1):.3g}" for some, w in by_ranks.items())
    # A contribution that is in no sum, also not in that of its own rank, while the others count once: it was lost before the sum.
    # A broadcast leaves out contributions too, but then the others count more than once.
    lost = {tuple(some) for some in lacking.values()} if len(lacking) == len(known) else set()
    counted = [abs(w - len(some)) < 1e-3 for by in known.values() for some, w in by.items() if abs(w) >= 1e-3]
    if len(lost) == 1 and counted and all(counted):
        (silent,) = lost
        what = f"lacks the contribution of ranks {list(silent)} on every rank, while the other ranks count once"
        where = "what clears or disconnects it on these ranks between the backward pass and the reduction"
        yield Claim("missing-gradient", what, where, rank=_SOME, residual=case.residual(candidate), is_local=True)
    elif lacking:
        short = "; ".join(f"rank {rank} lacks the gradient of ranks {some}" for rank, some in list(lacking.items())[:4])
        rank, missing = next(iter(lacking.items()))
        modes = [mode for mode in case.required if set(missing) <= set(case.groups.joint((mode,), rank))]
        claim = sum_not_made(case, modes[:1] or list(case.required), f"is not the sum over all ranks: {short}")
        yield replace(claim, rank=_SOME, residual=case.residual(candidate))
    else:
        rank = min(shown)
        what = f"sums the gradients of the ranks with unequal weights: {shown[rank]} on rank {rank}"
        where = "what each rank multiplies its gradient by before the reduction"
        yield Claim("wrong-divisor", what, where, rank=_ODD, residual=case.residual(candidate))


@hypothesis("gradient")
def passes_of_ranks(case: GradientCase) -> Iterator[Claim]:
    """Mistake: one pass of one rank is lost or counts twice; or some passes of other ranks are never added.

    Signature: the weights of the passes of all ranks that solve for the gradient are 0 or 2 for these passes.
    """
    if len(case.gradient.raw) < 2 or not case.wrong or case.reduction_is_right:
        return
    for like in similar(case):
        weights = _of_each_pass(like, case.wrong[0].rank)
        odd = [key for key, weight in (weights or {}).items() if abs(weight - 1) > 1e-3]
        if weights is not None and len(odd) == 1 and round(weights[odd[0]], 3) in (0, 2):
            number, rank = odd[0]
            lost = round(weights[odd[0]]) == 0
            what = f"{'lacks' if lost else 'counts twice'} micro-batch {number} of rank {rank}"
            cause = "micro-batch-missing" if lost else "micro-batch-twice"
            yield Claim(cause, what, f"that pass on rank {rank}", residual=0.3, rank=_SOME)
            return

        # Every rank has all of its own passes, but lacks some of the other ranks: these passes were not reduced.
        lacking: set[int] = set()
        for part in case.wrong if weights is not None and odd else ():
            zero = {key for key, weight in (_of_each_pass(like, part.rank) or {}).items() if abs(weight) < 1e-3}
            if not zero or any(rank == part.rank for _, rank in zero):
                lacking = set()
                break
            lacking |= {number for number, _ in zero}
        if lacking:
            what = (
                f"is not the sum over all ranks: micro-batch {_listed(sorted(lacking))} of the other ranks is not in it"
            )
            yield replace(sum_not_made(case, list(case.required), what), residual=0.3, rank=_SOME)
            return


def _of_each_pass(case: GradientCase, rank: int) -> dict[tuple[int, int], float] | None:
    """The weight of each pass of each rank in the gradient of one rank; all should be 1."""
    found = next((part for part in case.compared.found if part.rank == rank), None)
    if found is None:
        return None
    columns = {}
    for number, some in enumerate(case.gradient.raw):
        one_pass = case.of_pass(some)
        for other in case.groups.joint(tuple(case.required), rank):
            raw = one_pass.raw_at(other, found) if other in one_pass.raws else None
            if raw is None:
                return None
            columns[number, other] = raw
    weights = solved(list(columns.values()), flat(found.value), case.row.tolerance)
    return None if weights is None else {key: w * case.divisor for key, w in zip(columns, weights, strict=True)}


def _weights(case: GradientCase, part: LocalValue) -> _Weights | None:
    """The weights with which the local gradients add up to the gradient of this rank."""
    for like in similar(case):
        same_rank = next((x for x in like.compared.found if x.rank == part.rank), None)
        if same_rank is None or set(like.raws) != set(case.raws):
            continue

        # Ranks with equal gradients (of one data rank) can only be told apart together, so they are one column.
        groups: dict[tuple[int, ...], Tensor] = {}
        for rank in sorted(like.raws):
            raw = like.raw_at(rank, same_rank)
            if raw is None or length(raw) == 0:
                continue
            same = next((some for some, other in groups.items() if length(other - raw) <= 1e-9 * length(raw)), None)
            groups[(*same, rank) if same else (rank,)] = groups.pop(same) if same else raw
        if not groups:
            continue
        value, columns = flat(same_rank.value), list(groups.values())
        found = solved(columns, value, like.row.tolerance * max(1.0, length(value) / length(like.compared.truth)))
        if found is not None:
            return {ranks: weight * case.divisor for ranks, weight in zip(groups, found, strict=True)}
    return None


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


# --- Batches with different counts ---


@hypothesis("gradient")
def mean_of_means(case: GradientCase) -> Iterator[Claim]:
    """Mistake: the batches of all data ranks have equal weight, although some have more tokens.

    Signature: the plain mean of the gradients of these batches.
    """
    truths = [flat(x) for x in case.gradient.truth_of_data_ranks]
    if len(truths) < 2 or any(len(x) != case.compared.truth.numel() for x in truths):
        return
    if length(torch.stack(truths).mean(0) - flat(case.compared.truth)) <= case.row.tolerance:
        return  # all counts are equal, so the plain mean is right
    residual = case.residual(mixture(truths, [1 / len(truths)] * len(truths)))

    # With different counts, the reference is a mean of the same gradients with other weights. If it is no such mean, the ranks
    # compute other gradients from their batches than the single process does from the global batch.
    weights, is_small = None, True
    for like in similar(case):
        shares = [flat(x) for x in like.gradient.truth_of_data_ranks]
        if all(len(share) == like.compared.truth.numel() for share in shares):
            is_small = is_small and like.compared.truth.numel() < 3 * len(shares)
            weights = weights or solved(shares, flat(like.compared.truth), like.row.tolerance)
    if is_small or (weights is not None and min(weights) > 0 and abs(sum(weights) - 1) < 1e-3):
        what = "is the unweighted mean over the data ranks, whose batches have different token counts"
        where = "the loss: give (sum, count), and divide once by the count of the whole batch"
        yield Claim("mean-of-means", what, where, residual=residual)
        return
    what = (
        "is the mean over the data ranks of what each computes from its own batch, and no weights of these give the gradient "
        "of the global batch: a rank decides or measures something by its own batch"
    )
    where = (
        "what depends on the batch of a rank and not on its rows one by one: a limit that skips a batch, class weights, "
        "statistics, hard examples"
    )
    yield Claim("own-decision", what, where, residual=residual, is_local=True)


@hypothesis("gradient")
def means_of_passes_and_ranks(case: GradientCase) -> Iterator[Claim]:
    """Mistake: all passes of all ranks have equal weight, although some have more tokens.

    Signature: a weighted sum of the passes and ranks equals the truth, with unequal weights.
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
def weights_of_data_ranks(case: GradientCase) -> Iterator[Claim]:
    """Mistake: each rank divides its loss by a different number.

    Signature: the gradient is a weighted sum over the batches of the data ranks, with other weights than the truth.
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
            yield Claim("wrong-divisor", what, "the divisor of each rank's loss", residual=residual, rank=_ODD)
        return


@hypothesis("gradient")
def batch_of_one_data_rank(case: GradientCase) -> Iterator[Claim]:
    """Mistake: no reduction over the ranks that see distinct data. For runs without recorded local gradients.

    Signature: the gradient of one data rank's batch, or its term of the mean.
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

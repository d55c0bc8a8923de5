"""A gradient as a mixture of what each pass, or each rank, gave: by which weights it is made, which are all one in a healthy run.

The weights are solved for, not guessed, so a mistake needs no entry of its own to be seen: only a name for its pattern.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import torch
from torch import Tensor

from colonnade.context.parallel_mode import ParallelMode
from colonnade.proof.case import Candidate, GradientCase, sum_of_passes
from colonnade.proof.claims import Claim, hypothesis, sum_not_made
from colonnade.proof.compare import HeldPart, at_positions, flat, length

_SAMPLED = 1 << 16
_OTHERS = 8
_SOME, ODD = 40, 60
"""The ranks of claims that see that some are missing, and of those that see unlike weights and no pattern in them."""


def solved(columns: Sequence[Tensor], value: Tensor, allowed: float) -> list[float] | None:
    """The weights by which columns make a value, where one set of them does; None: none, or many."""
    if not columns or len(value) < 3 * len(columns):
        return None
    stride = -(-len(value) // _SAMPLED)
    matrix, wanted = torch.stack(list(columns), 1)[::stride], value[::stride]
    sizes = matrix.norm(dim=0)
    if not bool((sizes > 0).all()):
        return None
    spread = torch.linalg.svdvals(matrix / sizes)
    if float(spread[-1]) < 1e-4 * float(spread[0]):
        return None
    weights = torch.linalg.lstsq(matrix / sizes, wanted[:, None]).solution.flatten() / sizes
    return weights.tolist() if length(matrix @ weights - wanted) <= allowed else None


def mixture(wholes: Sequence[Tensor], weights: Sequence[float]) -> Candidate:
    """What a rank would hold of whole tensors with these weights."""

    def candidate(part: HeldPart) -> Tensor:
        some = [w * at_positions(one, part.positions) for w, one in zip(weights, wholes, strict=True)]
        return torch.stack(some).sum(0)

    return candidate


def similar(case: GradientCase) -> Iterator[GradientCase]:
    """The case, and those of the largest other gradients of the step that differ: what is too small is read off them."""
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
    """Weights of the passes, and how exactly they are known."""

    weights: Sequence[float]
    within: float
    sizes: Mapping[str, int]

    def named(self) -> tuple[str, str, str] | None:
        """(cause, what, where)"""
        weights, count = self.weights, len(self.weights)
        there = [at for at, weight in enumerate(weights) if weight > self.within]
        if not there or min(weights) < -self.within:
            return None
        least = min(weights[at] for at in there)
        more = [at for at in there if not self._same(weights[at], least)]
        lost = [at for at in range(count) if at not in there]
        between = "which pass starts the sums, and what clears gradients between passes"
        if not more and not lost:
            return None  # a plain factor
        if there == [count - 1]:
            return "last-micro-batch-only", f"is that of the last of {count} micro-batches only", between
        if not more and len(there) == 1:
            return "micro-batch-missing", f"is that of micro-batch {there[0]} of {count} only", between
        if not more:
            return "micro-batch-missing", f"lacks micro-batch {_listed(lost)} of {count}", between
        if not lost and (series := self._series()):
            return series
        usual = (1.0, float(count), 1 / count, count / (count + 1))
        if len(more) == 1 and self._same(weights[more[0]], 2 * least) and any(self._same(least, one) for one in usual):
            what = f"has micro-batch {more[0]} of {count} twice" + (
                f", in place of micro-batch {_listed(lost)}" if lost else ""
            )
            return "micro-batch-twice", what, "the loader's index, and what is summed more than once between passes"
        told = ", ".join(f"{weight:.3g}" for weight in weights[:6])
        what = f"has its micro-batches with the weights {told}, where each should weigh 1"
        return "scaled-by-accumulation", what, "what scales gradients between passes, and in which of them"

    def _series(self) -> tuple[str, str, str] | None:
        """Each pass does something to all that is accumulated so far."""
        ratios = [one / other for one, other in zip(self.weights, self.weights[1:], strict=False)]
        if any(not self._same(ratio, ratios[0]) for ratio in ratios):
            return None
        for mode, size in self.sizes.items():
            if self._same(ratios[0], size):
                what = f"has earlier micro-batches summed over {mode} again with each later one"
                return "reduced-twice", what, "whether each pass reduces all that is accumulated so far"
        return None

    def _same(self, one: float, other: float) -> bool:
        return abs(one - other) <= 4 * self.within * max(1.0, abs(other))


@hypothesis("gradient")
def passes(case: GradientCase) -> Iterator[Claim]:
    """Mistake: a micro-batch is lost, comes twice, or is scaled.

    Signature: the gradient is a sum of passes with weights, solved for, that are not all 1.
    """
    count = len(case.gradient.truth_of_passes)
    if count < 2:
        return
    for like in similar(case):
        truths = like.gradient.truth_of_passes
        if not like.wrong or any(one.numel() != like.compared.truth.numel() for one in truths):
            continue
        columns = [torch.cat([at_positions(one, part.positions) for part in like.wrong]) for one in truths]
        value = torch.cat([flat(part.value) for part in like.wrong])
        weights = solved(columns, value, 2 * like.row.tolerance * len(like.wrong) ** 0.5)
        if weights is None:
            continue
        within = max(1e-6, 4 * like.row.tolerance / min(map(length, columns)))
        # Two passes weigh 2 and 1 where one came twice, too, which is likelier than ties that are summed in each pass.
        sizes = {mode: size for mode, size in case.groups.sizes.items() if mode != ParallelMode.PIPELINE.name}
        pattern = _Pattern(weights, within, sizes).named()
        if pattern is not None and (again := _same_passes(case)):
            what = f"has micro-batch {again[0]} of {count} again in place of micro-batch {again[1]}"
            pattern = "micro-batch-twice", what, "the loader's index, and how a batch is sliced"
        if pattern is not None:
            residual = case.residual(mixture(case.gradient.truth_of_passes, weights))
            odd = pattern[0] == "scaled-by-accumulation"
            yield Claim(*pattern, residual=residual, rank=ODD if odd else 0)
        return


def _same_passes(case: GradientCase) -> tuple[int, int] | None:
    """Two passes whose raw gradients are the same on every rank, where one process has two that are not."""
    truths, raws = case.gradient.truth_of_passes, [sum_of_passes([some]) for some in case.gradient.raw]
    if len(raws) != len(truths):
        return None
    for one, other in combinations(range(len(raws)), 2):
        pairs = [(part.value, raws[other][rank].value) for rank, part in raws[one].items() if rank in raws[other]]
        same = bool(pairs) and all(length(mine) > 0 and torch.equal(mine, theirs) for mine, theirs in pairs)
        if same and length(flat(truths[one]) - flat(truths[other])) > case.row.tolerance:
            return one, other
    return None


# --- Ranks ---

_Weights = dict[tuple[int, ...], float]
"""Of ranks whose raw gradients are the same: what they count in the sum, where it should be 1 each."""


@hypothesis("gradient")
def ranks(case: GradientCase) -> Iterator[Claim]:
    """Mistake: a rank is left out of the sum, or counts more than another.

    Signature: the gradient is a sum of the ranks' own with weights, solved for, that are not 1 for each that is owed.
    """
    if not case.raws or not case.wrong or case.reduction_is_right:
        return
    weights = {part.rank: _weights(case, part) for part in case.wrong}
    known = {rank: found for rank, found in weights.items() if found is not None}
    if len(known) < len(weights):
        return

    def candidate(part: HeldPart) -> Tensor | None:
        some = [(case.raw_at(ranks[0], part), weight) for ranks, weight in known[part.rank].items()]
        if any(one is None for one, _ in some):
            return None
        return torch.stack([weight / case.divisor * one for one, weight in some if one is not None]).sum(0)

    claim = _unlike(case, known)
    if claim is not None:
        yield replace(claim, residual=case.residual(candidate))


@hypothesis("gradient")
def passes_of_ranks(case: GradientCase) -> Iterator[Claim]:
    """Mistake: one pass of one rank is lost or counts twice; or some passes of the others never arrive.

    Signature: weights of each pass of each rank, solved for, of which these are 0 or 2.
    """
    if len(case.gradient.raw) < 2 or not case.wrong or case.reduction_is_right:
        return
    for like in similar(case):
        weights = _of_each_pass(like, case.wrong[0].rank)
        odd = [key for key, weight in (weights or {}).items() if abs(weight - 1) > 1e-3]
        if weights is not None and len(odd) == 1 and round(weights[odd[0]], 3) in (0, 2):
            number, rank = odd[0]
            lost = round(weights[odd[0]]) == 0
            what = f"{'lacks' if lost else 'has twice'} micro-batch {number} of rank {rank}"
            cause = "micro-batch-missing" if lost else "micro-batch-twice"
            yield Claim(cause, what, f"what rank {rank} does in that pass", residual=0.3, rank=_SOME)
            return
        if weights is not None and odd and (lacking := _passes_of_others(like, case.wrong)):
            what = f"is not the sum of all: micro-batch {_listed(lacking)} of the other ranks is not in it"
            yield replace(sum_not_made(case, list(case.owed), what), residual=0.3, rank=_SOME)
            return


def _passes_of_others(case: GradientCase, wrong: Sequence[HeldPart]) -> list[int]:
    """The passes that each of these ranks has of itself and of no other."""
    lacking: set[int] = set()
    for part in wrong:
        weights = _of_each_pass(case, part.rank)
        zero = {key for key, weight in (weights or {}).items() if abs(weight) < 1e-3}
        if not zero or any(rank == part.rank for _, rank in zero):
            return []
        lacking |= {number for number, _ in zero}
    return sorted(lacking)


def _of_each_pass(case: GradientCase, rank: int) -> dict[tuple[int, int], float] | None:
    """What each pass of each rank counts in what a rank holds, where it should be 1."""
    mine = next((part for part in case.compared.found if part.rank == rank), None)
    owed = case.groups.joint(tuple(case.owed), rank)
    if mine is None:
        return None
    columns = {}
    for number, some in enumerate(case.gradient.raw):
        alone = case.of_pass(some)
        for other in owed:
            raw = alone.raw_at(other, mine) if other in alone.raws else None
            if raw is None:
                return None
            columns[number, other] = raw
    weights = solved(list(columns.values()), flat(mine.value), case.row.tolerance)
    return None if weights is None else {key: w * case.divisor for key, w in zip(columns, weights, strict=True)}


def _weights(case: GradientCase, part: HeldPart) -> _Weights | None:
    """By which the raw gradients make what this rank holds."""
    for like in similar(case):
        mine = [one for one in like.compared.found if one.rank == part.rank]
        groups = _alike(like, mine[0]) if mine else {}
        if set(like.raws) != set(case.raws) or not groups:
            continue
        value, columns = flat(mine[0].value), list(groups.values())
        found = solved(columns, value, like.row.tolerance * max(1.0, length(value) / length(like.compared.truth)))
        if found is not None:
            return {ranks: weight * case.divisor for ranks, weight in zip(groups, found, strict=True)}
    return None


def _alike(case: GradientCase, part: HeldPart) -> dict[tuple[int, ...], Tensor]:
    """The raw gradients where this rank's elements lie; ranks that have the same are one."""
    found: dict[tuple[int, ...], Tensor] = {}
    for rank in sorted(case.raws):
        raw = case.raw_at(rank, part)
        if raw is None or length(raw) == 0:
            continue
        same = next((ranks for ranks, one in found.items() if length(one - raw) <= 1e-9 * length(raw)), None)
        found[(*same, rank) if same else (rank,)] = found.pop(same) if same else raw
    return found


def _unlike(case: GradientCase, known: Mapping[int, _Weights]) -> Claim | None:
    lacking: dict[int, list[int]] = {}
    told: dict[int, str] = {}
    for rank, weights in known.items():
        owed = set(case.groups.joint(tuple(case.owed), rank))
        for some, weight in weights.items():
            due = len(owed & set(some))
            if due and abs(weight) < 1e-3:
                lacking.setdefault(rank, []).extend(sorted(owed & set(some)))
            elif not due and abs(weight) > 1e-3:
                return None  # over other ranks than owed, which has a hypothesis of its own
        told[rank] = ", ".join(f"{weight / (len(owed & set(some)) or 1):.3g}" for some, weight in weights.items())
    if lacking:
        short = "; ".join(f"rank {rank} lacks that of {ranks}" for rank, ranks in list(lacking.items())[:4])
        rank, ranks = next(iter(lacking.items()))
        modes = [mode for mode in case.owed if set(ranks) <= set(case.groups.joint((mode,), rank))]
        claim = sum_not_made(case, modes[:1] or list(case.owed), f"is not the sum of all: {short}")
        return replace(claim, rank=_SOME)
    rank = min(told)
    what = f"has the ranks' gradients with unlike weights: rank {rank} has them {told[rank]} times"
    return Claim("wrong-divisor", what, "what each rank multiplies its gradient by before the sum", rank=ODD)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))

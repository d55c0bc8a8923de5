"""A norm that differs though the gradients are right: what was counted, how often, and over which ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf, prod
from statistics import fmean

import torch

from colonnade.proof.case import NormCase, is_loss_scale, near, same_places, sum_of_passes
from colonnade.proof.claims import Claim, hypothesis
from colonnade.proof.compare import (
    NORM,
    HeldPart,
    distance,
    flat,
    in_units,
    length,
)
from colonnade.texts import pattern_of

_WEIGHTS = "which ranks' elements count in the norm, and with which weight"


@hypothesis("norm")
def summed_over_some_ranks(case: NormCase) -> Iterator[Claim]:
    """Mistake: the norm is summed over too few modes (shards are missed) or too many (replicas count several times).

    Signature: the norm of all that a rank holds, summed over some set of modes.
    """
    if case.p == inf:
        return
    for modes in case.groups.subsets():
        residual = case.residual({rank: _held(case, modes, rank) for rank in case.found}.__getitem__)
        if residual <= 1:
            yield _name_sum(case, modes, residual)


def _name_sum(case: NormCase, modes: tuple[str, ...], residual: float) -> Claim:
    split = [m for m in case.groups.of_mode if m not in modes and any(case.is_split(name, m) for name in case.parts)]
    copied = [m for m in modes if any(not case.is_split(name, m) for name in case.parts)]
    over = f"is summed over {' and '.join(modes)}" if modes else "is of what each rank holds"
    if copied and min(case.found.values()) > case.truth:
        what = f"{over} with what is replicated there counted on every rank"
        return Claim("norm-counts-replicas", what, _WEIGHTS, modes=tuple(copied), residual=residual)
    stages = [mode for mode in split if "PIPELINE" in mode.upper()]
    if stages and len(split) == len(stages):
        what = f"{over} only: each pipeline stage has its own norm"
        cause = "clipped-per-stage" if _clipped_by_it(case) else "norm-of-a-part"
        return Claim(cause, what, "the sum of the norm over stages", modes=tuple(stages), residual=residual)
    what = f"{over} only: shards on the other ranks of {' and '.join(split) or 'the world'} are not in it"
    return Claim("norm-misses-shards", what, _WEIGHTS, modes=tuple(split), residual=residual)


def _clipped_by_it(case: NormCase) -> bool:
    """Whether the clipped gradients are those of the norm that was found."""
    clipped = [one.clipped for one in case.step.gradients.values() if one.clipped is not None]
    return any(distance(part, one.truth) > 1e-2 * length(one.truth) for one in clipped for part in one.found)


@hypothesis("norm")
def replicas_of_a_mode(case: NormCase) -> Iterator[Claim]:
    """Mistake: elements that are replicated over a mode count once for each of its ranks.

    Signature: the true norm with these parameters' powers times the size of the mode.
    """
    if case.p == inf:
        return
    for modes in case.groups.subsets():
        if not modes:
            continue
        total = 0.0
        for name, power in case.once.items():
            total += power * prod(case.groups.sizes[mode] for mode in modes if not case.is_split(name, mode))
        what = f"counts what is replicated over {' and '.join(modes)} once for each of its ranks"
        residual = case.residual(case.root(total))
        yield Claim("norm-counts-replicas", what, _WEIGHTS, modes=modes, residual=residual)


@hypothesis("norm")
def some_parameters(case: NormCase) -> Iterator[Claim]:
    """Mistake: one kind of parameter (by placement, by name) is left out, or counts several times or in part.

    Signature: the true norm with the powers of that kind taken out or multiplied.
    """
    if case.p == inf:
        return
    whole = sum(case.once.values())
    for label, names in _kinds(case).items():
        if len(names) == len(case.once):
            continue
        part = sum(case.once[name] for name in names)
        if part == 0:
            continue
        for what, instead in ((f"leaves out {label}", 0.0), (f"has the weights of {label}, not their gradients", None)):
            other = sum(case.weights[name] for name in names) if instead is None else instead
            residual = case.residual(case.root(whole - part + other))
            yield Claim("norm-of-a-part", what, "which tensors it is given", residual=residual)
        times = {**case.groups.sizes, "2 (copies)": 2}
        for mode, size in times.items():
            counted = case.root(whole + (size - 1) * part)
            tied = any(case.evidence.parameters[name].tied for name in names if name in case.evidence.parameters)
            what = f"counts {label} {size} times" + (", as often as it has tied copies" if tied else "")
            yield Claim("norm-counts-replicas", what, _WEIGHTS, modes=(mode,), residual=case.residual(counted))
        for mode, size in case.groups.sizes.items():
            counted = case.root(whole - part + part / size)
            what = f"counts {label} for a {size}th part, as if replicated over {mode}"
            yield Claim("norm-misses-shards", what, _WEIGHTS, modes=(mode,), residual=case.residual(counted))
        yield from _first_shards(case, label, names, whole - part)
        yield from _own_shards(case, label, names)


def _own_shards(case: NormCase, label: str, names: Sequence[str]) -> Iterator[Claim]:
    """Split parameters alone, and of these what each rank holds."""
    if not any(case.is_split(name, mode) for name in names for mode in case.groups.of_mode):
        return
    totals = dict.fromkeys(case.found, 0.0)
    for part in (part for name in names for part in case.parts[name]):
        totals[part.rank] = totals.get(part.rank, 0.0) + case.power(part)
    what = f"is of what each rank holds of {label} only"
    residual = case.residual(lambda rank: case.root(totals[rank]))
    yield Claim("norm-misses-shards", what, _WEIGHTS, residual=residual)


@hypothesis("norm")
def shares_of_the_norm(case: NormCase) -> Iterator[Claim]:
    """Mistake: each rank has its share of the norm, and nobody adds the shares up.

    Signature: the ranks' norms differ, and their powers add up to the true one's, perhaps with one kind on every rank.
    """
    if case.p == inf or len(set(case.found.values())) < 2:
        return
    on_every_rank = {"": 0.0, **{label: sum(case.once[n] for n in names) for label, names in _kinds(case).items()}}
    for modes in case.groups.subsets():
        for rank in case.found if modes else ():
            ranks = [other for other in case.groups.joint(modes, rank) if other in case.found]
            total = sum(case.found[other] ** case.p for other in ranks)
            for label, power in on_every_rank.items():
                left = case.root(total - (len(ranks) - 1) * power)
                if in_units(abs(left - case.truth), case.row.tolerance) <= 1:
                    over, all_of = " and ".join(modes), f" (each has all of {label})" if label else ""
                    what = f"is each rank's share: their powers add up to the true one over {over}{all_of}, and nobody sums them"
                    where = f"the group that the norm is summed over ({over})"
                    yield Claim("norm-misses-shards", what, where, modes=modes)
                    return


def _first_shards(case: NormCase, label: str, names: Sequence[str], rest: float) -> Iterator[Claim]:
    """Split parameters of which only the first rank of a mode counts: they carry no mark that they are split."""
    for mode, groups in case.groups.of_mode.items():
        split = [name for name in names if case.is_split(name, mode)]
        if len(split) != len(names):
            continue
        for place in range(case.groups.sizes[mode]):
            chosen = {group[place] for group in groups if place < len(group)}
            seen: list[HeldPart] = []
            for name in names:
                unlike: list[HeldPart] = []
                for part in (part for part in case.parts[name] if part.rank in chosen):
                    if not any(same_places(part, other) for other in unlike):
                        unlike.append(part)
                seen += unlike
            value = case.root(rest + sum(map(case.power, seen)))
            what = f"counts {label} on rank {place} of {mode} only, though they are split over it"
            yield Claim("norm-misses-shards", what, _WEIGHTS, modes=(mode,), residual=case.residual(value))


def _kinds(case: NormCase) -> Mapping[str, list[str]]:
    """Parameters by placement, by what is split over a mode, by kind of name, and one by one."""
    kinds: dict[str, list[str]] = {}
    for name in case.once:
        info = case.evidence.parameters.get(name)
        for mode in case.groups.of_mode:
            kind = "split over" if case.is_split(name, mode) else "replicated over"
            kinds.setdefault(f"what is {kind} {mode}", []).append(name)
            if name.endswith("bias"):
                kinds.setdefault(f"biases of what is {kind} {mode}", []).append(name)
        if info is not None:
            kinds.setdefault(f"parameters placed as {info.placement}", []).append(name)
        if info is not None and info.tied:
            kinds.setdefault("tied weights", []).append(name)
        kinds.setdefault(f"parameters like {pattern_of(name, inside=True)}", []).append(name)
        kinds.setdefault(f"parameters called {name.rpartition('.')[2]}", []).append(name)
        for module in {name.partition(".")[0], name.rpartition(".")[0]} - {"", name}:
            kinds.setdefault(f"parameters of {module}", []).append(name)
        kinds.setdefault(name, []).append(name)
    unlike: dict[tuple[str, ...], str] = {}
    for label, names in kinds.items():
        unlike.setdefault(tuple(names), label)
    return {label: list(names) for names, label in unlike.items()}


@hypothesis("norm")
def off_by_a_factor(case: NormCase) -> Iterator[Claim]:
    """Mistake: the norm of sums instead of means, or of scaled gradients.

    Signature: the true norm times the size of a mode or its root, or times a large power of two.
    """
    if not case.truth or len(set(case.found.values())) > 1:
        return
    ratio = next(iter(case.found.values())) / case.truth
    exact = max(2 * case.row.tolerance / case.truth, 1e-9)
    p = 1.0 if case.p == inf else case.p
    for factor in near(ratio**p, case.groups.sizes, exact * p * ratio**p) if case.p != inf else ():
        modes = tuple(name for name, _ in factor.powers)
        cause = "norm-counts-replicas" if ratio > 1 else "norm-misses-shards"
        what = f"is {ratio:.6g} times the true one, the root of {factor}"
        yield Claim(cause, what, _WEIGHTS, ratio, modes, 0.9 * 0.3, rank=60)
    scaled = "whether it is taken of sums, of means, or of gradients that are still scaled"
    for factor in near(ratio, {**case.groups.sizes, "accumulation": case.evidence.accumulation}, exact):
        what = f"is {ratio:.6g} times the true one ({factor})"
        yield Claim("norm-of-a-part", what, scaled, ratio, residual=0.9 * 0.3, rank=61)
    if is_loss_scale(ratio, exact):
        what = f"is {ratio:g} times the true one, a power of two as loss scales are"
        yield Claim("loss-scale-left", what, scaled, ratio, residual=0.9 * 0.3, rank=62)


@hypothesis("norm")
def norms_of_norms(case: NormCase) -> Iterator[Claim]:
    """Mistake: norms are added or averaged instead of their powers.

    Signature: the sum or mean of the norms of parameters, of ranks or of groups.
    """
    where = "whether powers are summed before the one root is taken"
    if case.p == inf:
        return
    single = [case.root(power) for power in case.once.values()]
    yield Claim("norms-averaged", "adds the norms of parameters", where, residual=case.residual(sum(single)))
    for modes in case.groups.subsets():
        for inner in case.groups.subsets():
            if not modes or set(inner) & set(modes):
                continue

            norms = {
                rank: [_held(case, inner, other) for other in case.groups.joint(modes, rank)] for rank in case.found
            }
            of = f"the norms of ranks of {' and '.join(modes)}"
            added, mean, largest = (
                case.residual({rank: join(some) for rank, some in norms.items()}.__getitem__)
                for join in (sum, fmean, max)
            )
            yield Claim("norms-averaged", f"adds {of}", where, residual=added)
            yield Claim("norms-averaged", f"averages {of}", where, residual=mean)
            if any(max(some) - min(some) > case.row.tolerance for some in norms.values()):
                yield Claim(
                    "norm-misses-shards", f"is the largest of {of}", where, modes=modes, residual=largest, rank=2
                )
    yield from _groups_added(case, where)


def _held(case: NormCase, modes: Sequence[str], rank: int) -> float:
    """The norm of all that the ranks that modes reach hold."""
    return case.root(sum(case.by_rank.get(other, 0.0) for other in case.groups.joint(modes, rank)))


def _groups_added(case: NormCase, where: str) -> Iterator[Claim]:
    whole = sum(case.once.values())
    for label, names in _kinds(case).items():
        part = sum(case.once[name] for name in names)
        value = case.root(part) + case.root(whole - part)
        yield Claim(
            "norms-averaged", f"adds the norm of {label} to that of the rest", where, residual=case.residual(value)
        )


@hypothesis("norm")
def another_type(case: NormCase) -> Iterator[Claim]:
    """Mistake: another p-norm, or one p for the powers and another for the root.

    Signature: the norm with that p.
    """
    values = torch.cat([flat(case.step.gradients[name].total.truth) for name in case.parts]).abs()
    where = "the norm type that is passed on"
    for p in (1.0, 2.0, 3.0, inf):
        value = float(values.max()) if p == inf else float(values.pow(p).sum()) ** (1 / p)
        if p != case.p:
            yield Claim("norm-type-differs", f"is the {p:g}-norm", where, residual=case.residual(value))
    if case.p != inf:
        what = f"is the sum of powers of {case.p:g}, of which no root was taken"
        yield Claim("norm-type-differs", what, where, residual=case.residual(case.truth**case.p))
    if case.p not in (2.0, inf):
        value = float(values.pow(2).sum()) ** (1 / case.p)
        what = f"sums squares and takes the root of order {case.p:g}"
        yield Claim("norm-type-differs", what, where, residual=case.residual(value))


@hypothesis("norm")
def of_something_else(case: NormCase) -> Iterator[Claim]:
    """Mistake: the norm of something else: this rank's own gradients, the last micro-batch, an earlier step, the clipped gradient, nothing.

    Signature: the norm of that.
    """
    if not any(case.found.values()) and case.truth:
        what = "is zero: it is taken of gradients that are not there"
        yield Claim("norm-of-a-part", what, "where it reads gradients from, and when")
    yield from _of_earlier_steps(case)
    if case.p == inf:
        return
    own: dict[int, float] = {}
    last: float | None = 0.0
    for name in case.parts:
        gradient = case.step.gradients[name]
        for rank, part in sum_of_passes(gradient.raw).items():
            own[rank] = own.get(rank, 0.0) + case.power(part)
        passes = gradient.truth_of_passes
        last = None if last is None or len(passes) < 2 else last + float(flat(passes[-1]).abs().pow(case.p).sum())
    if own:
        residual = case.residual(lambda rank: case.root(own.get(rank, 0.0)))
        what = "is that of this rank's own gradients, before they were reduced"
        yield Claim("norm-of-a-part", what, "the order of norm and handlers", residual=residual)
    if last is not None and case.parts:
        for scale in (1.0, float(case.evidence.accumulation)):
            residual = case.residual(scale * case.root(last))
            what = "is that of the last micro-batch alone"
            yield Claim("norm-of-a-part", what, "when the norm is taken", residual=residual)
    if case.evidence.max_norm is not None:
        what = "is the limit itself: taken after clipping"
        yield Claim("norm-of-a-part", what, "when the norm is taken", residual=case.residual(case.evidence.max_norm))


def _of_earlier_steps(case: NormCase) -> Iterator[Claim]:
    """That of an earlier step, or the largest so far: something is kept."""
    if case.row.quantity != NORM:
        return
    for back in range(1, case.at + 1):
        residual = case.residual(case.evidence.steps[case.at - back].norm or 0.0)
        what = "is that of the step before" if back == 1 else f"is that of {back} steps before"
        yield Claim("stale-gradient", what, "what keeps it between steps", residual=residual, rank=1)

"""A gradient norm that is wrong although the gradients are right: elements left out, counted twice, or on wrong ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf, prod
from statistics import fmean

import torch

from colonnade.proof.case import NormCase, digits, is_loss_scale, near, same_places, sum_of_passes
from colonnade.proof.claims import Claim, hypothesis
from colonnade.proof.compare import (
    NORM,
    LocalValue,
    distance,
    flat,
    in_units,
    length,
)
from colonnade.texts import pattern_of

_WEIGHTS = "the elements of each rank that count in the norm, and their weights"


@hypothesis("norm")
def summed_over_some_ranks(case: NormCase) -> Iterator[Claim]:
    """Mistake: the norm is summed over too few modes (shards are missing) or too many (replicas count several times).

    Signature: the norm of the tensors of each rank, summed over some set of modes.
    """
    if case.p == inf:
        return
    for modes in case.groups.subsets():
        residual = case.residual({rank: _local_norm(case, modes, rank) for rank in case.found}.__getitem__)
        if residual > 1:
            continue
        left = [mode for mode in case.groups.of_mode if mode not in modes]
        split = [mode for mode in left if any(case.is_sharded(name, mode) for name in case.parts)]
        copied = [mode for mode in modes if any(not case.is_sharded(name, mode) for name in case.parts)]
        stages = [mode for mode in split if "PIPELINE" in mode.upper()]
        over = f"is summed over {' and '.join(modes)} only" if modes else "is local to each rank"
        if copied and min(case.found.values()) > case.truth:
            what = (
                f"is summed over {' and '.join(modes)}, and counts replicated parameters once for each of these ranks"
            )
            yield Claim("norm-counts-replicas", what, _WEIGHTS, modes=tuple(copied), residual=residual)
        elif stages and len(split) == len(stages):
            # If the clipped gradients are wrong as well, each stage clips by its own norm; else it only reports that norm.
            clipped = [gradient.clipped for gradient in case.step.gradients.values() if gradient.clipped is not None]
            wrong = any(
                distance(part, gradient.truth) > 1e-2 * length(gradient.truth)
                for gradient in clipped
                for part in gradient.found
            )
            cause = "clipped-per-stage" if wrong else "norm-of-a-part"
            what = f"{over}: each pipeline stage has its own norm"
            yield Claim(cause, what, "the reduction of the norm over stages", modes=tuple(stages), residual=residual)
        else:
            what = f"{over}: the shards on the other ranks of {' and '.join(split) or 'the world'} are missing from it"
            yield Claim("norm-misses-shards", what, _WEIGHTS, modes=tuple(split), residual=residual)


@hypothesis("norm")
def replicas_of_a_mode(case: NormCase) -> Iterator[Claim]:
    """Mistake: elements that are replicated over a mode count once for each rank of the mode.

    Signature: the true norm, with the powers |x|^p of these parameters multiplied by the size of the mode.
    """
    if case.p == inf:
        return
    for modes in case.groups.subsets():
        if not modes:
            continue
        total = 0.0
        for name, power in case.once.items():
            total += power * prod(case.groups.sizes[mode] for mode in modes if not case.is_sharded(name, mode))
        what = f"counts parameters that are replicated over {' and '.join(modes)} once for each of its ranks"
        residual = case.residual(case.root(total))
        yield Claim("norm-counts-replicas", what, _WEIGHTS, modes=modes, residual=residual)


@hypothesis("norm")
def some_parameters(case: NormCase) -> Iterator[Claim]:
    """Mistake: one kind of parameter (by placement, by name) is left out, or counts several times or in part.

    Signature: the true norm, with the powers |x|^p of that kind removed or multiplied.
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
        weights = sum(case.weights[name] for name in names)
        for what, other in (
            (f"leaves out {label}", 0.0),
            (f"has the weights of {label} instead of their gradients", weights),
        ):
            residual = case.residual(case.root(whole - part + other))
            yield Claim("norm-of-a-part", what, "the tensors that it is computed from", residual=residual)
        times = {**case.groups.sizes, "2 (copies)": 2}
        for mode, size in times.items():
            counted = case.root(whole + (size - 1) * part)
            tied = any(case.evidence.parameters[name].tied for name in names if name in case.evidence.parameters)
            what = f"counts {label} {size} times" + (", once for each tied copy" if tied else "")
            yield Claim("norm-counts-replicas", what, _WEIGHTS, modes=(mode,), residual=case.residual(counted))
        for mode, size in case.groups.sizes.items():
            counted = case.root(whole - part + part / size)
            what = f"counts 1/{size} of {label}, as if they were replicated over {mode}"
            yield Claim("norm-misses-shards", what, _WEIGHTS, modes=(mode,), residual=case.residual(counted))

        # Sharded parameters that are treated as replicated, so that only the shards of one rank of the group count.
        for mode, groups in case.groups.of_mode.items():
            for place in range(case.groups.sizes[mode]) if all(case.is_sharded(name, mode) for name in names) else ():
                chosen = {group[place] for group in groups if place < len(group)}
                total = whole - part
                for name in names:
                    counted_shards: list[LocalValue] = []
                    for shard in (shard for shard in case.parts[name] if shard.rank in chosen):
                        if not any(same_places(shard, other) for other in counted_shards):
                            counted_shards.append(shard)
                    total += sum(map(case.power, counted_shards))
                what = f"counts {label} on rank {place} of {mode} only, although they are sharded over it"
                residual = case.residual(case.root(total))
                yield Claim("norm-misses-shards", what, _WEIGHTS, modes=(mode,), residual=residual)

        # Nothing but the local shards of these parameters.
        if any(case.is_sharded(name, mode) for name in names for mode in case.groups.of_mode):
            totals = dict.fromkeys(case.found, 0.0)
            for shard in (shard for name in names for shard in case.parts[name]):
                totals[shard.rank] = totals.get(shard.rank, 0.0) + case.power(shard)
            by_rank = {rank: case.root(power) for rank, power in totals.items()}
            what = f"is that of each rank's local shards of {label} only"
            yield Claim("norm-misses-shards", what, _WEIGHTS, residual=case.residual(by_rank.__getitem__))


@hypothesis("norm")
def shares_of_the_norm(case: NormCase) -> Iterator[Claim]:
    """Mistake: each rank has its contribution to the norm, and the contributions are never added.

    Signature: the ranks' norms differ, and their powers add up to that of the true norm, perhaps with replicas of one
    kind.
    """
    if case.p == inf or len(set(case.found.values())) < 2:
        return
    # Replicated parameters are in the contribution of every rank, so they are subtracted for all ranks but one.
    on_every_rank = {"": 0.0, **{label: sum(case.once[n] for n in names) for label, names in _kinds(case).items()}}
    for modes in case.groups.subsets():
        for rank in case.found if modes else ():
            ranks = [other for other in case.groups.joint(modes, rank) if other in case.found]
            total = sum(case.found[other] ** case.p for other in ranks)
            for label, power in on_every_rank.items():
                left = case.root(total - (len(ranks) - 1) * power)
                if in_units(abs(left - case.truth), case.row.tolerance) <= 1:
                    over, replicated = " and ".join(modes), f", with {label} on every rank" if label else ""
                    what = f"is the contribution of each rank: their powers add up over {over}{replicated}, and nothing sums them"
                    where = f"the process group that the norm is summed over ({over})"
                    yield Claim("norm-misses-shards", what, where, modes=modes)
                    return


def _kinds(case: NormCase) -> Mapping[str, list[str]]:
    """Sets of parameters that code may treat alike: by placement, by sharding over a mode, by name, and each alone."""
    kinds: dict[str, list[str]] = {}
    for name in case.once:
        info = case.evidence.parameters.get(name)
        for mode in case.groups.of_mode:
            kind = "sharded over" if case.is_sharded(name, mode) else "replicated over"
            kinds.setdefault(f"parameters {kind} {mode}", []).append(name)
            if name.endswith("bias"):
                kinds.setdefault(f"biases {kind} {mode}", []).append(name)
        if info is not None:
            kinds.setdefault(f"parameters placed as {info.placement}", []).append(name)
        if info is not None and info.tied:
            kinds.setdefault("tied weights", []).append(name)
        kinds.setdefault(f"parameters like {pattern_of(name, inside=True)}", []).append(name)
        kinds.setdefault(f"parameters called {name.rpartition('.')[2]}", []).append(name)
        for module in {name.partition(".")[0], name.rpartition(".")[0]} - {"", name}:
            kinds.setdefault(f"parameters of {module}", []).append(name)
        kinds.setdefault(name, []).append(name)
    # Of several descriptions of the same parameters, the first one is the most general.
    unlike: dict[tuple[str, ...], str] = {}
    for label, names in kinds.items():
        unlike.setdefault(tuple(names), label)
    return {label: list(names) for names, label in unlike.items()}


@hypothesis("norm")
def off_by_a_factor(case: NormCase) -> Iterator[Claim]:
    """Mistake: the norm of sums instead of means, or of scaled gradients.

    Signature: the true norm times the size of a mode or its square root, or times a large power of two.
    """
    if not case.truth or len(set(case.found.values())) > 1:
        return
    # A p-norm is a root of a sum of powers, so a factor in the sum is a root of that factor in the norm.
    ratio = next(iter(case.found.values())) / case.truth
    exact = max(2 * case.row.tolerance / case.truth, 1e-9)
    p = 1.0 if case.p == inf else case.p
    for factor in near(ratio**p, case.groups.sizes, exact * p * ratio**p) if case.p != inf else ():
        modes = tuple(name for name, _ in factor.powers)
        cause = "norm-counts-replicas" if ratio > 1 else "norm-misses-shards"
        what = f"is {digits(ratio)} times the true norm, the {'square root' if p == 2 else f'root of order {p:g}'} of {factor}"
        yield Claim(cause, what, _WEIGHTS, ratio, modes, 0.9 * 0.3, rank=60)
    scaled = "whether it is computed from sums, from means, or from gradients that are still scaled"
    for factor in near(ratio, {**case.groups.sizes, "accumulation": case.evidence.accumulation}, exact):
        what = f"is {digits(ratio)} times the true norm ({factor})"
        yield Claim("norm-of-a-part", what, scaled, ratio, residual=0.9 * 0.3, rank=61)
    if is_loss_scale(ratio, exact):
        what = f"is {ratio:g} times the true norm, a power of two as loss scales are"
        yield Claim("loss-scale-left", what, scaled, ratio, residual=0.9 * 0.3, rank=62)


@hypothesis("norm")
def norms_of_norms(case: NormCase) -> Iterator[Claim]:
    """Mistake: norms are added or averaged, instead of the powers |x|^p.

    Signature: the sum or mean of the norms of parameters, of ranks or of groups.
    """
    where = "whether squares (powers) are summed first, and only one root is taken at the end"
    if case.p == inf:
        return
    single = [case.root(power) for power in case.once.values()]
    yield Claim("norms-averaged", "adds the norms of parameters", where, residual=case.residual(sum(single)))
    for modes in case.groups.subsets():
        for inner in case.groups.subsets():
            if not modes or set(inner) & set(modes):
                continue

            norms = {
                rank: [_local_norm(case, inner, other) for other in case.groups.joint(modes, rank)]
                for rank in case.found
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
    whole = sum(case.once.values())
    for label, names in _kinds(case).items():
        part = sum(case.once[name] for name in names)
        residual = case.residual(case.root(part) + case.root(whole - part))
        yield Claim("norms-averaged", f"adds the norm of {label} to that of the others", where, residual=residual)


def _local_norm(case: NormCase, modes: Sequence[str], rank: int) -> float:
    """The norm of all tensors on the ranks that modes reach, where replicas count several times."""
    return case.root(sum(case.by_rank.get(other, 0.0) for other in case.groups.joint(modes, rank)))


@hypothesis("norm")
def another_type(case: NormCase) -> Iterator[Claim]:
    """Mistake: a wrong p in the p-norm, or different p for the powers and the root.

    Signature: the norm with that p.
    """
    values = torch.cat([flat(case.step.gradients[name].total.truth) for name in case.parts]).abs()
    where = "the norm type that is passed to the function"
    for p in (1.0, 2.0, 3.0, inf):
        value = float(values.max()) if p == inf else float(values.pow(p).sum()) ** (1 / p)
        if p != case.p:
            yield Claim("norm-type-differs", f"is the {p:g}-norm", where, residual=case.residual(value))
    if case.p != inf:
        what = f"is the sum of powers of {case.p:g} without the root"
        yield Claim("norm-type-differs", what, where, residual=case.residual(case.truth**case.p))
    if case.p not in (2.0, inf):
        value = float(values.pow(2).sum()) ** (1 / case.p)
        what = f"sums squares, but takes the root of order {case.p:g}"
        yield Claim("norm-type-differs", what, where, residual=case.residual(value))


@hypothesis("norm")
def of_something_else(case: NormCase) -> Iterator[Claim]:
    """Mistake: the norm of wrong tensors (local gradients, last micro-batch, earlier step, clipped gradients) or of none.

    Signature: the norm of these tensors.
    """
    if not any(case.found.values()) and case.truth:
        what = "is zero: it is computed while there are no gradients"
        yield Claim("norm-of-a-part", what, "where it reads gradients from, and when")
    for back in range(1, case.at + 1) if case.row.quantity == NORM else ():
        residual = case.residual(case.evidence.steps[case.at - back].norm or 0.0)
        what = "is that of the previous step" if back == 1 else f"is that of the step {back} steps earlier"
        yield Claim("stale-gradient", what, "values that are kept between steps", residual=residual, rank=1)
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
        what = "is that of each rank's local gradients, before the reduction"
        yield Claim("norm-of-a-part", what, "the order of norm and handlers", residual=residual)
    if last is not None and case.parts:
        for scale in (1.0, float(case.evidence.accumulation)):
            residual = case.residual(scale * case.root(last))
            what = "is that of the last micro-batch only"
            yield Claim("norm-of-a-part", what, "when the norm is taken", residual=residual)
    if case.evidence.max_norm is not None:
        what = "is the limit itself: it is computed after clipping"
        yield Claim("norm-of-a-part", what, "when the norm is taken", residual=case.residual(case.evidence.max_norm))

"""Right numbers in wrong places: shards swapped, interleaved or transposed; and replicas that differ."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from math import isqrt

import torch
from torch import Tensor

from colonnade.proof.case import Case, GradientCase, near, same_places
from colonnade.proof.claims import Claim, hypothesis
from colonnade.proof.compare import HeldPart, at_positions, distance, flat, in_units, length


@hypothesis("gradient")
@hypothesis("tensor")
def swapped(case: Case) -> Iterator[Claim]:
    """Mistake: ranks of a group are in another order where a tensor is cut or gathered.

    Signature: each wrong rank holds the elements that belong to another rank.
    """
    owners = {part.rank: _owner(case, part) for part in case.wrong}
    known = {rank: owner for rank, owner in owners.items() if owner is not None}
    if not known or len(known) < len(owners):
        return
    pairs = ", ".join(f"rank {rank} has that of rank {owner}" for rank, (owner, _) in list(known.items())[:4])
    residual = max(left for _, left in known.values())
    yield Claim("shards-swapped", f"has its shards in another order: {pairs}", _ORDER, residual=residual)


_ORDER = "the order of ranks in the group that cuts or gathers it"


def _owner(case: Case, part: HeldPart) -> tuple[int, float] | None:
    """The rank whose place in the truth these elements fit, and how well."""
    for other in case.compared.found:
        if other.rank == part.rank or other.value.numel() != part.value.numel() or same_places(part, other):
            continue
        left = in_units(
            length(flat(part.value) - at_positions(case.compared.truth, other.positions)), case.row.tolerance
        )
        if left <= 1:
            return other.rank, left
    return None


@hypothesis("gradient")
@hypothesis("tensor")
def transposed(case: Case) -> Iterator[Claim]:
    """Mistake: rows and columns are exchanged.

    Signature: the transpose of the part.
    """
    residual = case.residual(lambda part: _transposed(case, part))
    yield Claim("shard-transposed", "is transposed", "a transpose that is made on one side only", residual=residual)


def _transposed(case: Case, part: HeldPart) -> Tensor | None:
    """The truth at the part's places, with rows and columns exchanged but in the part's own shape."""
    wanted = case.truth(part)
    if wanted is None or wanted.numel() < 4:
        return None
    shape = part.value.shape
    if len(shape) != 2:
        shape = case.compared.truth.shape
    if len(shape) != 2 or shape[0] * shape[1] != wanted.numel() or 1 in shape:
        return None
    turned = wanted.view(shape[0], shape[1]).T.reshape(-1)
    back = wanted.view(shape[1], shape[0]).T.reshape(-1)
    value = flat(part.value)
    return turned if length(value - turned) <= length(value - back) else back


@hypothesis("gradient")
@hypothesis("tensor")
def interleaved(case: Case) -> Iterator[Claim]:
    """Mistake: a tensor is cut in blocks where it is read in strides, or fused parts (q, k, v) lie in another order.

    Signature: the ranks together hold the right numbers, at other places.
    """
    parts = _one_of_each(case)
    if sum(part.value.numel() for part in parts) != case.compared.truth.numel() or case.compared.truth.numel() < 4:
        return
    found = torch.cat([flat(part.value) for part in parts])
    truth = torch.cat([at_positions(case.compared.truth, part.positions) for part in parts])
    allowed = case.row.tolerance
    residual = in_units(length(found.sort().values - truth.sort().values), allowed)
    if residual > 1 or _spacing(truth) * isqrt(len(truth)) < 4 * allowed:
        return
    known = _is_dealt(case, found, parts, allowed)
    what = "has its shards interleaved" if known else "has the right numbers in other places"
    where = "how it is cut: in blocks or in strides, and in which order fused parts (q, k, v; gate, up) lie"
    yield Claim("shards-interleaved", what, where, residual=residual)


def _one_of_each(case: Case) -> list[HeldPart]:
    """One holder of each shard, a wrong one first."""
    chosen: list[HeldPart] = []
    wrong = {id(part) for part in case.wrong}
    for part in sorted(case.compared.found, key=lambda part: id(part) not in wrong):
        if not any(same_places(part, other) for other in chosen):
            chosen.append(part)
    return sorted(chosen, key=lambda part: part.rank)


def _is_dealt(case: Case, found: Tensor, parts: list[HeldPart], allowed: float) -> bool:
    """Whether dealing rows out in turn instead of in blocks, along any dimension, gives what was found."""
    whole, count = case.compared.truth.double(), len(parts)
    for dim, size in enumerate(whole.shape):
        if count > 1 and size % count == 0:
            dealt = [whole.index_select(dim, torch.arange(at, size, count)).flatten() for at in range(count)]
            if length(torch.cat(dealt) - found) <= allowed:
                return True
    return False


def _spacing(values: Tensor) -> float:
    """The median gap of sorted values: where it is below the noise, sorted values agree by themselves."""
    return float(values.sort().values.diff().median()) if len(values) > 1 else 0.0


@hypothesis("gradient")
@hypothesis("tensor")
def replicas_differ(case: Case) -> Iterator[Claim]:
    """Mistake: something makes replicas unlike: data, random numbers, a reduction that some skip.

    Signature: ranks that hold the same elements differ; some are right, or no two agree.
    """
    wrong = case.wrong
    if not wrong:
        return
    right = [part for part in case.compared.found if all(part is not other for other in wrong)]
    against = [part for part in wrong if any(same_places(part, other) for other in right)]
    if len(against) == len(wrong):
        ranks = sorted({part.rank for part in wrong})
        agree = sorted({part.rank for part in right})
        what = f"differs between replicas: ranks {ranks} are wrong, ranks {agree} agree with one process"
        yield Claim("replicas-differ", what, "what these ranks do that the others do not", residual=0.5, rank=80)
    elif apart := _unlike(wrong, case.row.tolerance):
        what = f"differs between replicas: ranks {apart} do not hold the same"
        where = "what makes ranks unlike: data, random numbers, a reduction that some skip"
        yield Claim("replicas-differ", what, where, residual=0.5, rank=80)


def _unlike(parts: list[HeldPart], allowed: float) -> list[int]:
    for one, other in combinations(parts, 2):
        alike = one.rank != other.rank and same_places(one, other) and one.value.numel() == other.value.numel()
        if alike and in_units(length(flat(one.value) - flat(other.value)), allowed) > 1:
            return [one.rank, other.rank]
    return []


_SEARCHED = 20_000_000


@hypothesis("gradient")
def of_another_parameter(case: GradientCase) -> Iterator[Claim]:
    """Mistake: a flat buffer is filled in one order and emptied in another, or read at another offset.

    Signature: all gradients in a row have these numbers at another place.
    """
    wholes = {name: flat(one.total.truth) for name, one in case.step.gradients.items()}
    if case.compared.truth.numel() < 4 or sum(map(len, wholes.values())) > _SEARCHED:
        return
    row, starts, first = torch.cat(list(wholes.values())), {}, 0
    for name, whole in wholes.items():
        starts[name], first = first, first + len(whole)
    found = {_place_in(row, flat(part.value), case.row.tolerance) for part in case.wrong}
    if len(found) != 1 or (place := found.pop()) is None:
        return
    owner = max((name for name in starts if starts[name] <= place), key=lambda name: starts[name])
    what = f"has the numbers of {owner}" + (
        f" from element {place - starts[owner]} on" if place > starts[owner] else ""
    )
    where = "the order in which a flat buffer is filled and emptied, and its offsets"
    yield Claim("gradients-exchanged", what, where, residual=0.3)


def _place_in(row: Tensor, value: Tensor, allowed: float) -> int | None:
    """Where these numbers lie in a row of more of them."""
    if len(value) < 4 or length(value) <= allowed:
        return None
    pivot = int(value.abs().argmax())
    for place in ((row - value[pivot]).abs() <= allowed).nonzero().flatten().tolist()[:50]:
        start = place - pivot
        if start >= 0 and length(row[start : start + len(value)] - value[: len(row) - start]) <= allowed:
            return start
    return None


@hypothesis("tensor")
def a_sum_is_missing(case: Case) -> Iterator[Claim]:
    """Mistake: the ranks of a mode hold parts of a sum, and nobody adds them.

    Signature: the parts add up to the truth.
    """
    for mode in case.groups.of_mode:
        lefts = []
        for part in case.wrong:
            ranks = case.groups.joint((mode,), part.rank)
            same = [p for p in case.compared.found if p.rank in ranks and same_places(p, part)]
            if len(same) < 2:
                break
            total = torch.stack([flat(p.value) for p in same]).sum(0)
            lefts.append(
                in_units(distance(HeldPart(part.rank, total, part.positions), case.compared.truth), case.row.tolerance)
            )
        if lefts and len(lefts) == len(case.wrong):
            what = f"is a part of a sum: what the ranks of {mode} hold adds up to it"
            yield Claim("partial", what, f"the sum over {mode} in the forward pass", modes=(mode,), residual=max(lefts))


@hypothesis("tensor")
def times_a_number(case: Case) -> Iterator[Claim]:
    """Mistake: a factor too many or too few.

    Signature: a constant times the truth.
    """
    fitted = case.fit(case.truth)
    if fitted is None or case.compared.truth.numel() < 2:
        return
    value, within = fitted
    names = near(value, case.sizes, max(within, 1e-9))
    what = f"is {value:.6g} times what it should be" + (f" ({' or '.join(map(str, names))})" if names else "")
    modes = tuple(name for factor in names for name, _ in factor.powers)
    residual = case.residual(case.truth, value)
    yield Claim("factor", what, "sums that are taken twice or not divided", value, modes, residual)


@hypothesis("tensor")
def as_before(case: Case) -> Iterator[Claim]:
    """Mistake: nobody wrote to it in this step.

    Signature: the value of the step before.
    """
    before = case.before
    if before is None:
        return
    residual = case.residual(lambda part: at_positions(before, part.positions))
    yield Claim("not-updated", "is as it was before the step", _NOT_STEPPED, residual=residual, rank=1)


_NOT_STEPPED = "whether the optimizer has this parameter, and whether weights are gathered after the step, not before"

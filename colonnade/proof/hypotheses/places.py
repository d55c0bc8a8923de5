"""Right numbers at wrong places: shards swapped, interleaved or transposed; and replicas that differ."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from math import isqrt

import torch
from torch import Tensor

from colonnade.proof.case import Case, GradientCase, digits, either, near, same_places
from colonnade.proof.claims import Claim, hypothesis
from colonnade.proof.compare import LocalValue, at_positions, distance, flat, in_units, length


@hypothesis("gradient")
@hypothesis("tensor")
def swapped(case: Case) -> Iterator[Claim]:
    """Mistake: the ranks of a group are in a wrong order where a tensor is sharded or gathered.

    Signature: each wrong rank has the elements of another rank's shard.
    """
    owners = {part.rank: _owner(case, part) for part in case.wrong}
    known = {rank: owner for rank, owner in owners.items() if owner is not None}
    if not known or len(known) < len(owners):
        return
    pairs = ", ".join(f"rank {rank} has the shard of rank {owner}" for rank, (owner, _) in list(known.items())[:4])
    residual = max(left for _, left in known.values())
    yield Claim("shards-swapped", f"has its shards in the wrong order: {pairs}", _ORDER, residual=residual)


_ORDER = "the order of ranks in the group that shards or gathers it"


def _owner(case: Case, part: LocalValue) -> tuple[int, float] | None:
    """The rank whose shard of the truth has these elements, and the remaining distance."""
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

    Signature: the transpose of the shard.
    """

    def candidate(part: LocalValue) -> Tensor | None:
        wanted = case.truth(part)
        if wanted is None or wanted.numel() < 4:
            return None
        shape = part.value.shape if part.value.dim() == 2 else case.compared.truth.shape
        if len(shape) != 2 or shape[0] * shape[1] != wanted.numel() or 1 in shape:
            return None
        # Whether the shape is that before or after the transpose is not known, so both are tried.
        forth = wanted.view(shape[0], shape[1]).T.reshape(-1)
        back = wanted.view(shape[1], shape[0]).T.reshape(-1)
        value = flat(part.value)
        return forth if length(value - forth) <= length(value - back) else back

    residual = case.residual(candidate)
    yield Claim("shard-transposed", "is transposed", "a transpose that is made on one side only", residual=residual)


@hypothesis("gradient")
@hypothesis("tensor")
def interleaved(case: Case) -> Iterator[Claim]:
    """Mistake: a tensor is sharded in blocks but read in strides, or fused weights (q, k, v) are in the wrong order.

    Signature: the ranks together have the right numbers, at wrong places.
    """
    parts = _one_of_each(case)
    if sum(part.value.numel() for part in parts) != case.compared.truth.numel() or case.compared.truth.numel() < 4:
        return
    found = torch.cat([flat(part.value) for part in parts])
    truth = torch.cat([at_positions(case.compared.truth, part.positions) for part in parts])
    allowed = case.row.tolerance
    residual = in_units(length(found.sort().values - truth.sort().values), allowed)
    # Where the gaps between sorted values are below the noise, sorted values agree whatever their order was.
    gap = float(truth.sort().values.diff().median())
    if residual > 1 or gap * isqrt(len(truth)) < 4 * allowed:
        return
    dealt, full, count = False, case.compared.truth.double(), len(parts)
    for dim, size in enumerate(full.shape):
        if count > 1 and size % count == 0:
            rows = [full.index_select(dim, torch.arange(at, size, count)).flatten() for at in range(count)]
            dealt = dealt or length(torch.cat(rows) - found) <= allowed
    what = (
        "has its shards interleaved (strides instead of blocks)" if dealt else "has the right numbers at wrong places"
    )
    where = "how it is sharded: in blocks or in strides, and in which order fused weights (q, k, v; gate, up) are"
    yield Claim("shards-interleaved", what, where, residual=residual)


def _one_of_each(case: Case) -> list[LocalValue]:
    """One replica of each shard, a wrong one if there is one."""
    chosen: list[LocalValue] = []
    wrong = {id(part) for part in case.wrong}
    for part in sorted(case.compared.found, key=lambda part: id(part) not in wrong):
        if not any(same_places(part, other) for other in chosen):
            chosen.append(part)
    return sorted(chosen, key=lambda part: part.rank)


@hypothesis("gradient")
@hypothesis("tensor")
def replicas_differ(case: Case) -> Iterator[Claim]:
    """Mistake: replicas get different data or random numbers, or some of them skip a reduction.

    Signature: ranks that store the same elements differ; some are right, or no two agree.
    """
    wrong = case.wrong
    if not wrong:
        return
    right = [part for part in case.compared.found if all(part is not other for other in wrong)]
    against = [part for part in wrong if any(same_places(part, other) for other in right)]
    if len(against) == len(wrong):
        ranks = sorted({part.rank for part in wrong})
        agree = sorted({part.rank for part in right})
        what = f"differs between replicas: ranks {ranks} are wrong, ranks {agree} agree with a single process"
        where = "anything that only the wrong ranks do"
        yield Claim("replicas-differ", what, where, residual=0.5, rank=80)
        return
    for a, b in combinations(wrong, 2):
        replicas = a.rank != b.rank and same_places(a, b) and a.value.numel() == b.value.numel()
        if replicas and in_units(length(flat(a.value) - flat(b.value)), case.row.tolerance) > 1:
            what = f"differs between replicas: ranks {[a.rank, b.rank]} have different values"
            where = "anything that differs between ranks: data, random numbers, a reduction that some skip"
            local = case.local_factor if isinstance(case, GradientCase) else None
            after = local is not None and abs(local - 1) <= 1e-6
            if after:
                what = f"{what}, although their local gradients are right"
                where = "handlers, hooks and other code between the backward pass and the optimizer that use numbers of their own rank"
            yield Claim("replicas-differ", what, where, residual=0.5, rank=80, is_local=after)
            return


_SEARCHED = 20_000_000


@hypothesis("gradient")
def of_another_parameter(case: GradientCase) -> Iterator[Claim]:
    """Mistake: a flat buffer is filled in one order and emptied in another, or read at another offset.

    Signature: the concatenation of all gradients has these numbers at another offset.
    """
    wholes = {name: flat(gradient.total.truth) for name, gradient in case.step.gradients.items()}
    if case.compared.truth.numel() < 4 or sum(map(len, wholes.values())) > _SEARCHED:
        return
    row, starts, first = torch.cat(list(wholes.values())), {}, 0
    for name, whole in wholes.items():
        starts[name], first = first, first + len(whole)
    found = {_place_in(row, flat(part.value), case.row.tolerance) for part in case.wrong}
    if len(found) != 1 or (place := found.pop()) is None:
        return
    owner = max((name for name in starts if starts[name] <= place), key=lambda name: starts[name])
    since = f", from its element {place - starts[owner]}" if place > starts[owner] else ""
    where = "the order in which a flat buffer is filled and emptied, and its offsets"
    yield Claim("gradients-exchanged", f"has the gradient of {owner}{since}", where, residual=0.3)


@hypothesis("gradient")
def with_another_added(case: GradientCase) -> Iterator[Claim]:
    """Mistake: a buffer that several parameters share is not zeroed before one of them accumulates into it.

    Signature: the truth plus the gradient of another parameter of this size.
    """
    size = case.compared.truth.numel()
    for name, gradient in case.step.gradients.items() if size >= 4 else ():
        other = gradient.total.truth
        if name == case.name or other.numel() != size or not bool(other.any()):
            continue
        residual = case.residual(case.moved_to(flat(case.compared.truth) + flat(other)))
        where = "buffers that parameters of one shape share, and when they are zeroed"
        yield Claim("gradients-exchanged", f"has the gradient of {name} added to it", where, residual=residual)


def _place_in(row: Tensor, value: Tensor, allowed: float) -> int | None:
    """The offset of these numbers in a longer row of numbers."""
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
    """Mistake: the ranks of a mode have partial sums that are never added.

    Signature: the partial sums add up to the truth.
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
                in_units(
                    distance(LocalValue(part.rank, total, part.positions), case.compared.truth), case.row.tolerance
                )
            )
        if lefts and len(lefts) == len(case.wrong):
            what = f"is partial: the values of the ranks of {mode} add up to the true one, and nothing sums them"
            yield Claim("partial", what, f"the sum over {mode} in the forward pass", modes=(mode,), residual=max(lefts))


@hypothesis("tensor")
def times_a_number(case: Case) -> Iterator[Claim]:
    """Mistake: the tensor is multiplied by a wrong factor.

    Signature: a constant times the truth.
    """
    fitted = case.fit(case.truth)
    if fitted is None or case.compared.truth.numel() < 2:
        return
    value, within = fitted
    names = near(value, case.sizes, max(within, 1e-9))
    what = f"is {digits(value)} times what it should be{either(names)}"
    modes = tuple(name for factor in names for name, _ in factor.powers)
    residual = case.residual(case.truth, value)
    yield Claim("factor", what, "reductions that are made twice or not divided", value, modes, residual)


@hypothesis("tensor")
def as_before(case: Case) -> Iterator[Claim]:
    """Mistake: the tensor was not updated in this step.

    Signature: the value before the step.
    """
    before = case.before
    if before is None:
        return
    residual = case.residual(lambda part: at_positions(before, part.positions))
    yield Claim("not-updated", "is unchanged by the step", _NOT_STEPPED, residual=residual, rank=1)


_NOT_STEPPED = "the parameter groups of the optimizer, and whether weights are gathered after the step, not before"

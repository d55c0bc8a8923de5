"""A clipped gradient that is wrong although the gradient before clipping is right."""

from __future__ import annotations

from collections.abc import Iterator

from colonnade.proof.case import ClipCase
from colonnade.proof.claims import Claim, hypothesis
from colonnade.proof.compare import flat


@hypothesis("clipped")
def not_at_all(case: ClipCase) -> Iterator[Claim]:
    """Mistake: the optimizer does not step with the clipped gradients.

    Signature: the norm is over the limit, and the gradient is unchanged.
    """
    if case.due < 1:
        what = "is not clipped, although the norm is over the limit"
        where = "whether the optimizer steps with the gradients that were clipped"
        yield Claim("not-clipped", what, where, residual=case.residual(lambda name, rank: 1.0))


@hypothesis("clipped")
def twice(case: ClipCase) -> Iterator[Claim]:
    """Mistake: gradients are clipped in two places, such as the engine and the user's loop.

    Signature: the clip coefficient squared.
    """
    what = "is multiplied by the clip coefficient twice"
    residual = case.residual(lambda name, rank: case.due**2)
    yield Claim("clipped-twice", what, "clipping outside of the engine", residual=residual)


@hypothesis("clipped")
def by_the_norm_that_was_found(case: ClipCase) -> Iterator[Claim]:
    """Mistake: each rank clips by the norm that it reports, which is not that of all gradients.

    Signature: the clip coefficient of that norm.
    """
    found = case.step.found_norm
    if not any(value is not None for value in found):
        return
    residual = case.residual(lambda name, rank: case.by(found[rank] or 0.0) if rank < len(found) else 1.0)
    what = "is clipped by a norm that is not the norm of all gradients"
    yield Claim("norm-of-a-part", what, "the norm that each rank clips by", residual=residual, rank=40)


@hypothesis("clipped")
def by_the_norm_of_some_ranks(case: ClipCase) -> Iterator[Claim]:
    """Mistake: the norm by which a rank clips is not all-reduced over some modes (tensor ranks, stages).

    Signature: the clip coefficient of the norm of these ranks' shards.
    """
    for modes in case.groups.subsets():

        def coefficient(name: str, rank: int, modes: tuple[str, ...] = modes) -> float:
            ranks = case.groups.joint(modes, rank)
            return case.by(case.norms.root(sum(case.norms.by_rank.get(other, 0.0) for other in ranks)))

        residual = case.residual(coefficient)
        left = [mode for mode in case.groups.of_mode if mode not in modes]
        split = [mode for mode in left if any(case.norms.is_sharded(name, mode) for name in case.norms.parts)]
        over = " and ".join(split) or "the world"
        if any("PIPELINE" in mode.upper() for mode in split) and len(split) == 1:
            what = "is clipped by the norm of its own pipeline stage"
            yield Claim(
                "clipped-per-stage", what, "the sum of the norm over stages", modes=tuple(split), residual=residual
            )
        else:
            what = f"is clipped by a norm that leaves out the other ranks of {over}"
            yield Claim(
                "norm-misses-shards", what, "the norm that each rank clips by", modes=tuple(split), residual=residual
            )


@hypothesis("clipped")
def by_its_own_norm(case: ClipCase) -> Iterator[Claim]:
    """Mistake: each parameter is clipped separately, by its own norm.

    Signature: each coefficient is that of the parameter's own norm.
    """
    own = {name: case.norms.root(power) for name, power in case.norms.once.items()}
    residual = case.residual(lambda name, rank: case.by(own[name]))
    yield Claim(
        "norm-of-a-part",
        "is clipped by its own norm instead of the norm of all gradients",
        "whether all parameters are passed to one call of the clip function",
        residual=residual,
    )


@hypothesis("clipped")
def by_another_factor(case: ClipCase) -> Iterator[Claim]:
    """Mistake: unknown; all gradients have the same wrong coefficient.

    Signature: a constant times the gradient. The claim has the highest `rank`, so every claim that explains more comes
    first.
    """
    row = case.rows[0]
    gradient = case.step.gradients[row.name]
    before = {part.rank: part for part in gradient.total.found}
    if gradient.clipped is None or not gradient.clipped.found:
        return
    part = gradient.clipped.found[0]
    own = before.get(part.rank)
    if own is None or own.value.numel() != part.value.numel() or not bool(own.value.any()):
        return
    factor = float(flat(part.value) @ flat(own.value)) / float(flat(own.value) @ flat(own.value))
    what = f"is multiplied by {factor:.6g} instead of {case.due:.6g}"
    where = "the limit that is applied, and anything else that scales gradients before the step"
    yield Claim("wrong-divisor", what, where, factor / case.due, residual=case.residual(lambda n, r: factor), rank=70)

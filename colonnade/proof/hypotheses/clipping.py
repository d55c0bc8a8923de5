"""A clipped gradient that differs though the gradient before clipping is right."""

from __future__ import annotations

from collections.abc import Iterator

from colonnade.proof.case import ClipCase
from colonnade.proof.claims import Claim, hypothesis
from colonnade.proof.compare import flat


@hypothesis("clipped")
def not_at_all(case: ClipCase) -> Iterator[Claim]:
    """Mistake: clipped gradients are not those that the optimizer steps on.

    Signature: the norm is over the limit, and the gradient is as before.
    """
    if case.due < 1:
        what = "is not clipped, though the norm is over the limit"
        where = "whether the optimizer steps with the gradients that were clipped"
        yield Claim("not-clipped", what, where, residual=case.residual(lambda name, rank: 1.0))


@hypothesis("clipped")
def twice(case: ClipCase) -> Iterator[Claim]:
    """Mistake: two parties clip, the engine and the user's loop, say.

    Signature: the coefficient squared.
    """
    what = "is multiplied by the coefficient twice"
    residual = case.residual(lambda name, rank: case.due**2)
    yield Claim("clipped-twice", what, "who clips besides the engine", residual=residual)


@hypothesis("clipped")
def by_the_norm_that_was_found(case: ClipCase) -> Iterator[Claim]:
    """Mistake: each rank clips by the norm that it reports, which is not that of the whole.

    Signature: the coefficient of that norm.
    """
    found = case.step.found_norm
    if not any(value is not None for value in found):
        return
    residual = case.residual(lambda name, rank: case.by(found[rank] or 0.0) if rank < len(found) else 1.0)
    what = "is scaled by a norm that is not that of the whole gradient"
    yield Claim("norm-of-a-part", what, "the norm that each rank clips by", residual=residual, rank=40)


@hypothesis("clipped")
def by_the_norm_of_some_ranks(case: ClipCase) -> Iterator[Claim]:
    """Mistake: the norm by which ranks clip is not summed over some modes (tensor ranks, stages).

    Signature: the coefficient of the norm of what these ranks hold.
    """
    for modes in case.groups.subsets():

        def coefficient(name: str, rank: int, modes: tuple[str, ...] = modes) -> float:
            ranks = case.groups.joint(modes, rank)
            return case.by(case.norms.root(sum(case.norms.by_rank.get(other, 0.0) for other in ranks)))

        residual = case.residual(coefficient)
        left = [mode for mode in case.groups.of_mode if mode not in modes]
        split = [mode for mode in left if any(case.norms.is_split(name, mode) for name in case.norms.parts)]
        over = " and ".join(split) or "the world"
        if any("PIPELINE" in mode.upper() for mode in split) and len(split) == 1:
            what = "is scaled by the norm of its own pipeline stage"
            yield Claim(
                "clipped-per-stage", what, "the sum of the norm over stages", modes=tuple(split), residual=residual
            )
        else:
            what = f"is scaled by a norm that misses the other ranks of {over}"
            yield Claim(
                "norm-misses-shards", what, "the norm that each rank clips by", modes=tuple(split), residual=residual
            )


@hypothesis("clipped")
def by_its_own_norm(case: ClipCase) -> Iterator[Claim]:
    """Mistake: the clip is called for one parameter after another.

    Signature: each coefficient is that of the parameter's own norm.
    """
    own = {name: case.norms.root(power) for name, power in case.norms.once.items()}
    residual = case.residual(lambda name, rank: case.by(own[name]))
    yield Claim(
        "norm-of-a-part",
        "is scaled by its own norm, not by that of all",
        "what is passed to the clip at once",
        residual=residual,
    )


@hypothesis("clipped")
def by_another_factor(case: ClipCase) -> Iterator[Claim]:
    """Mistake: unknown, but one and the same wrong coefficient everywhere.

    Signature: a constant times the gradient. Asked after all that says more.
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
    share = float(flat(part.value) @ flat(own.value)) / float(flat(own.value) @ flat(own.value))
    what = f"is multiplied by {share:.6g}, not by {case.due:.6g}"
    where = "the limit that is applied, and what else scales gradients before the step"
    yield Claim("wrong-divisor", what, where, share / case.due, residual=case.residual(lambda n, r: share), rank=70)

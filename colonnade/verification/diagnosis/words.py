"""The words of findings: names in a row, the ledger's line, and what else the numbers would allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from colonnade.verification.comparing.evidence import Evidence
from colonnade.verification.diagnosis.table import Claim


def listed(names: Sequence[str]) -> str:
    """The first and how many more."""
    if len(names) <= 3:
        return ", ".join(names)
    return f"{names[0]}, {names[1]} and {len(names) - 2} more"


def best_of(some: Sequence[Claim]) -> Claim | None:
    """The simplest."""
    return min(some, key=lambda claim: (claim.rank, claim.doubt), default=None)


def rivals(best: Claim, names: Sequence[str], left: Mapping[str, Sequence[Claim]]) -> str:
    """Other causes that the numbers cannot tell from the best: of the same hypothesis, on the same parameters."""
    common = [
        claim
        for claim in left[names[0]]
        if (claim.rank, claim.doubt) == (best.rank, best.doubt)
        and all(any(other.key == claim.key for other in left[name]) for name in names)
    ]
    alike = {" and ".join(claim.modes): claim for claim in common if claim.cause == best.cause and claim.factor}
    same = [modes for modes, claim in alike.items() if claim.factor == best.factor and claim.modes != best.modes]
    others = {claim.cause: claim for claim in common if claim.cause != best.cause}
    told = f" (or of {' or '.join(same)}, which the numbers cannot tell from it)" if same else ""
    return told + "".join(f", or {claim.cause} (it {claim.what})" for claim in others.values())


def first_look(names: Sequence[str], thing: str) -> str:
    """Where to look when no hypothesis fits."""
    if "gradient" in thing:
        return f"look at {names[-1]} first, which the backward pass reaches before the others"
    return f"look at what writes {listed(names)}, and what ranks should tell each other for it"


def ledger_line(evidence: Evidence, name: str, claim: Claim | None = None) -> str:
    """What the ledger plans for a parameter, over the modes of the claim."""
    info = evidence.parameters.get(name)
    if info is None or not info.ledger:
        has_one = info is not None and any(other.ledger for other in evidence.parameters.values())
        return " (ledger: no sum of it is planned)" if has_one else ""
    modes = claim.modes if claim is not None else ()
    line = next((line for line in info.ledger if any(mode in line for mode in modes)), info.ledger[0])
    return f" (ledger: {line})"


def ledger_under(evidence: Evidence, module: str) -> str:
    """The same for the first parameter of a module."""
    inside = (name for name in evidence.parameters if name.startswith(f"{module}."))
    return next((text for name in inside if (text := ledger_line(evidence, name))), "")

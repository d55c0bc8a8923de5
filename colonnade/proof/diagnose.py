"""Why a parallel run differs from one process: hypotheses are tested on the numbers, upstream first.

`diagnose` compares, and `_Diagnosis.findings` looks at what differs in the order in which a step makes it. What follows
from an earlier mistake is a row of the table and no finding. Each look builds a case (case.py), asks the hypotheses of its
kind (claims.py) and turns the claims that explain most into findings (`_group`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isclose
from typing import Any

from torch import Tensor

from colonnade.proof import hypotheses  # noqa: F401  importing the package fills the table
from colonnade.proof.case import Case, ClipCase, GradientCase, Groups, NormCase, near, raw_scale
from colonnade.proof.claims import CAUSES, Claim, claims
from colonnade.proof.compare import (
    ACTIVATION,
    BUFFER,
    CLIPPED,
    GRADIENT,
    LOSS,
    MASKS,
    MODE,
    NORM,
    NORMS,
    RECOMPUTED,
    WEIGHTS,
    WEIGHTS_AT_START,
    Compared,
    Evidence,
    Finding,
    Report,
    Row,
    StepEvidence,
    compare,
    differing_elements,
    short_ranks,
)
from colonnade.texts import pattern_of

_SURE = 80
"""Claims of this rank and above say that something differs, and little of why."""
_TESTED_ELEMENTS = 20_000_000
"""Gradients that differ are tested one by one up to so many elements in all."""


def diagnose(evidence: Evidence) -> Report:
    """Compare everything and name what is wrong. What follows from an earlier mistake is in the table, not a finding."""
    rows = compare(evidence)
    wrong = [row for row in rows if not row.ok]
    findings = _Diagnosis(evidence, rows).findings() if wrong else []
    return Report(tuple(findings), tuple(rows), tuple(evidence.notes))


class _Diagnosis:
    """The rows of one comparison, looked at in the order in which a step makes them."""

    def __init__(self, evidence: Evidence, rows: Sequence[Row]) -> None:
        self.evidence, self.rows, self.groups = evidence, rows, Groups(evidence)
        self.wrong = [row for row in rows if not row.ok]
        self.at = next((row.step for row in self.wrong if row.step is not None), 0)

    def findings(self) -> list[Finding]:
        """The mistakes of the first step that differs. Later steps start from its weights, and follow from it."""
        # NaN spreads to everything that it is added to, so that no other difference means anything.
        if broken := self._not_finite():
            return broken

        # One process begins with the weights of the ranks. Where these are not those of one model, all else differs too.
        if start := self._at_start():
            return start

        # Each rank cut its part out of a batch of its own: every activation is of other data.
        if apart := self._cut_apart():
            return apart

        # The forward pass. Other masks make other activations, so masks come first. Of a module whose output changes when it
        # is computed again either of the two may be the right one, so that is said, and not that its output differs.
        again = self._recomputed()
        forward = self._masks() or ([] if again else self._forward())

        # Gradients follow from activations, and are looked at where these are right.
        backward = forward or again or self._gradients()

        # The loss that is reported may be wrong by itself, as a mean over the wrong ranks. It may also be that from which
        # gradients are wrong for a reason that no hypothesis has found; then it is the better thing to name.
        loss = [] if forward else self._loss(backward)
        known = [finding for finding in backward if finding.cause != "unknown"]
        found = [*known, *loss] if loss else [*backward]

        # Norm, clipped gradient and weight: each follows from the one before.
        if not backward:
            found += self._norm() or self._clipped() or self._weights()

        # Buffers (running statistics) follow from activations alone.
        if not forward:
            found += self._buffers()
        return found or [self._unknown()]

    @property
    def step(self) -> StepEvidence:
        """The first step that differs."""
        return self.evidence.steps[self.at]

    def rows_of(self, *quantities: str) -> list[Row]:
        """What differs of a quantity, in that step."""
        return [row for row in self.wrong if row.quantity in quantities and row.step in (None, self.at)]

    # --- From the start weights to the loss ---

    def _not_finite(self) -> list[Finding]:
        broken = [row for row in self.wrong if row.status == "not finite" and row.step in (None, self.at)]
        if not broken:
            return []
        row = broken[0]
        where = "the norm" if row.name == NORM else f"the {row.quantity} {row.name}"
        if row.detail:
            sentence = f"{where} is not finite in one process either: it is the model or the data, not the parallelism."
        else:
            sentence = (
                f"{where} is the first that is not finite, on ranks {short_ranks(row.ranks)}{self._raw_source(row)}."
            )
        return [Finding("not-finite", (row.name,), row.step, sentence)]

    def _raw_source(self, row: Row) -> str:
        """A sum spreads NaN to every rank: whose raw gradient had it?"""
        gradient = self.step.gradients.get(row.name) if row.quantity == GRADIENT else None
        bad = [
            (part.rank, at)
            for at, some in enumerate(gradient.raw if gradient is not None else ())
            for part in some
            if not bool(part.value.isfinite().all())
        ]
        if bad:
            return f", and comes from rank {bad[0][0]} in micro-batch {bad[0][1]}; look at what it is fed there"
        if gradient is not None and gradient.raw:
            return ", though no rank's own gradient has it; look at its reduction, and what is done to it afterwards"
        if row.quantity in (NORM, NORMS):
            return ", though all gradients are; look at the dtype in which powers are summed, and at divisions by zero"
        return "; look at what these ranks are fed there"

    def _at_start(self) -> list[Finding]:
        rows = self.rows_of(WEIGHTS_AT_START)
        named = {row.name: claims("tensor", self._case(self.evidence.weights_at_start[row.name], row)) for row in rows}
        weights = {name: some for name, some in named.items() if name in self.evidence.parameters}
        buffers = {name: some for name, some in named.items() if name not in weights}
        return [
            *self._group(weights, None, "the weight", "weights-differ-at-start", rows),
            *self._group(buffers, None, "the buffer", "buffers-differ", rows, always=True),
        ]

    def _masks(self) -> list[Finding]:
        if resting := self.rows_of(MODE):
            names, ranks = tuple(row.name or "the model" for row in resting), short_ranks(resting[0].ranks)
            how = f"in evaluation mode on ranks {ranks} and trains on the others; look at who calls eval() there."
            return [Finding("forward-differs", names, None, f"{_shortened(names)} is {how}")]
        how = "drops other elements than the first rank that holds the same activation; look at its random numbers."
        rows = [(row.name, short_ranks(row.ranks)) for row in self.rows_of(MASKS)[:1]]
        return [Finding("masks-differ", (name,), None, f"{name} on ranks {ranks} {how}") for name, ranks in rows]

    def _forward(self) -> list[Finding]:
        rows = self.rows_of(ACTIVATION)
        if not rows:
            return []
        row = rows[0]
        case = self._case(self.step.activations[row.name], row)
        rounded = claims("activation", case)
        best = _simplest([*claims("tensor", case), *rounded])
        how = f"its output {best.what}" if best else f"its output is off by {row.error:.3g} tolerances"
        where = f"that module, and {best.where}" if best else "that module"
        sentence = (
            f"the forward pass parts from one process at {row.name} on ranks {short_ranks(row.ranks)}: {how}, and "
            f"everything that was recorded before it agrees; look at {where}{_ledger_under(self.evidence, row.name)}."
        )
        if best is not None and best in rounded:
            return [Finding("rounded", (row.name,), self.at, sentence)]
        if best is not None and row.name == next(iter(self.step.activations)):
            if best.cause == "replicas-differ":
                sentence = (
                    f"the first module, {row.name}, {best.what}: ranks that see the same data were given other batches."
                )
                return [Finding("replicas-differ", (row.name,), self.at, sentence)]
            if best.cause == "shards-swapped" and len(row.ranks) < len(self.step.activations[row.name].found):
                sentence = f"the first module, {row.name}, {best.what}: some ranks were given the batch of others; look at the loader."
                return [Finding("micro-batch-twice", (row.name,), self.at, sentence)]
        return [Finding("forward-differs", (row.name,), self.at, sentence, best.factor if best else None)]

    def _cut_apart(self) -> list[Finding]:
        how = "were given batches of their own, and each cut its part out of its own; give all of them the same whole batch"
        some = [f"the ranks of {mode} {how}." for mode in self.evidence.cut_apart]
        return [Finding("replicas-differ", (), self.at, sentence) for sentence in some]

    def _recomputed(self) -> list[Finding]:
        """A module that runs again in the backward pass and gives another output, whichever of the two is right."""
        rows = self.rows_of(RECOMPUTED)
        if not rows:
            return []
        names = tuple(row.name for row in rows)
        sentence = (
            f"{rows[0].name} gives one output in the forward pass and another when it runs again in the backward pass, on "
            f"ranks {short_ranks(rows[0].ranks)}; look at what differs between the two: random numbers, masks, "
            f"buffers, routing or autocast."
        )
        return [Finding("recomputation-differs", names, self.at, sentence)]

    def _loss(self, backward: Sequence[Finding]) -> list[Finding]:
        rows = self.rows_of(LOSS)
        if not rows or any(finding.cause != "unknown" for finding in backward):
            return []
        found = [value for value in self.step.found_loss if value is not None]
        how = f"{rows[0].detail}"
        factor = None
        if found and self.step.loss and all(isclose(value, found[0], rel_tol=1e-9) for value in found):
            factor = found[0] / self.step.loss
            sizes = {**self.groups.sizes, "accumulation": self.evidence.accumulation}
            names = near(factor, sizes, max(1e-9, 2 * rows[0].tolerance / abs(self.step.loss)))
            how += f", {factor:.6g} times it" + (f" ({' or '.join(map(str, names))})" if names else "")
        elif found:
            how += ", and ranks differ"
        seen = "every activation that was recorded agrees" if self.step.activations else "no activation was recorded"
        sentence = f"the loss is {how}, while {seen}; look at how the loss is averaged over passes, tokens and ranks."
        return [Finding("loss-differs", (), self.at, sentence, factor)]

    # --- Gradients ---

    def _gradients(self) -> list[Finding]:
        rows = self.rows_of(GRADIENT)
        if not rows:
            return []
        wrong = {row.name for row in rows}
        alive = {name for name, one in self.step.gradients.items() if bool(one.total.truth.any())}
        scale = raw_scale(self.evidence, self.groups, self.step, wrong)
        healthy = frozenset(alive - wrong)
        tested = {
            row.name: self._tested(self._gradient_case(row, healthy, scale), "gradient") for row in self._to_test(rows)
        }
        alike = {self._kind(name): some for name, some in tested.items()}
        named = {row.name: tested.get(row.name, alike.get(self._kind(row.name), [])) for row in rows}
        return self._group(named, self.at, "the gradient of", "", rows)

    def _tested(self, case: Case, *kinds: str) -> list[Claim]:
        """The claims that explain all of it; or, where a part of its elements is right, those that explain the others."""
        found = [claim for kind in kinds for claim in claims(kind, case)]
        if all(claim.rank >= _SURE for claim in found):
            elements = differing_elements(case.compared, case.row.tolerance)
            part = case.within(elements) if elements is not None else None
            inside = [] if part is None else [claim for kind in kinds for claim in claims(kind, part)]
            some = [replace(claim, what=f"in a part of its elements {claim.what}") for claim in inside]
            found = [claim for claim in some if claim.rank < _SURE] or found or some
        return found

    def _to_test(self, rows: Sequence[Row]) -> Sequence[Row]:
        """The gradients that are tested: all; of a large model the first and the last of each kind, the others being layers like these."""
        if sum(self.step.gradients[row.name].total.truth.numel() for row in rows) <= _TESTED_ELEMENTS:
            return rows
        kinds: dict[str, list[Row]] = {}
        for row in rows:
            kinds.setdefault(self._kind(row.name), []).append(row)
        return [row for some in kinds.values() for row in (some if len(some) < 3 else [some[0], some[-1]])]

    def _kind(self, name: str) -> str:
        """The name without its numbers, and the placement."""
        info = self.evidence.parameters.get(name)
        return pattern_of(name, inside=True) + (f" {info.placement}" if info is not None else "")

    def _gradient_case(self, row: Row, healthy: frozenset[str], scale: float) -> GradientCase:
        gradient = self.step.gradients[row.name]
        return GradientCase(
            evidence=self.evidence,
            groups=self.groups,
            compared=gradient.total,
            row=row,
            before=self._gradient_at(self.at - 1, row.name, "truth"),
            name=row.name,
            gradient=gradient,
            step=self.step,
            at=self.at,
            later=self._gradient_at(self.at + 1, row.name, "whole"),
            healthy=healthy,
            raw_scale=scale,
        )

    def _gradient_at(self, at: int, name: str, which: str) -> Any:
        if not 0 <= at < len(self.evidence.steps) or name not in self.evidence.steps[at].gradients:
            return None
        total = self.evidence.steps[at].gradients[name].total
        return total.truth if which == "truth" else total

    # --- Norm, clipping, weights, buffers ---

    def _norm(self) -> list[Finding]:
        found = []
        for row in self.rows_of(NORM, NORMS)[:1]:
            best = _simplest(claims("norm", NormCase(self.evidence, self.groups, self.step, self.at, row)))
            what = f"is {row.detail}: it {best.what}" if best else f"is {row.detail}, and no hypothesis fits"
            where = best.where if best else "which elements count in it, how often, and over which ranks it is summed"
            sentence = f"the norm{'' if row.name == NORM else f' of {row.name}'} {what}; look at {where}."
            found.append(
                Finding(best.cause if best else "unknown", (), self.at, sentence, best.factor if best else None)
            )
        return found

    def _clipped(self) -> list[Finding]:
        rows = self.rows_of(CLIPPED)
        if not rows:
            return []
        case = ClipCase(self.evidence, self.groups, self.step, self.at, tuple(rows))
        best = _simplest(claims("clipped", case))
        names = tuple(row.name for row in rows)
        if best is None:
            sentence = f"{_shortened(names)}: the gradient and the norm are right, and the clipped gradient is not; look at what is multiplied by the coefficient."
            return [Finding("unknown", names, self.at, sentence)]
        sentence = f"the clipped gradient of {_shortened(names)} {best.what}; look at {best.where}."
        return [Finding(best.cause, names, self.at, sentence, best.factor)]

    def _weights(self) -> list[Finding]:
        rows = self.rows_of(WEIGHTS)
        named = {}
        for row in rows:
            before = self.evidence.steps[self.at - 1].weights if self.at else self.evidence.weights_at_start
            old = before[row.name].truth if row.name in before else None
            named[row.name] = self._tested(self._case(self.step.weights[row.name], row, old), "tensor", "weights")
        return self._group(named, self.at, "the weight", "optimizer-differs", rows)

    def _buffers(self) -> list[Finding]:
        rows = self.rows_of(BUFFER)
        named = {row.name: claims("tensor", self._case(self.step.buffers[row.name], row)) for row in rows}
        return self._group(named, self.at, "the buffer", "buffers-differ", rows, always=True)

    # --- From claims to findings ---

    def _case(self, tensor: Compared, row: Row, before: Tensor | None = None) -> Case:
        return Case(evidence=self.evidence, groups=self.groups, compared=tensor, row=row, before=before)

    def _group(
        self,
        named: Mapping[str, Sequence[Claim]],
        step: int | None,
        thing: str,
        cause: str,
        rows: Sequence[Row],
        always: bool = False,
    ) -> list[Finding]:
        """The fewest claims that explain all parameters, that which explains most first. `cause`: of claims whose own is none of `CAUSES`."""
        left = dict(named)
        found = []
        while left and any(left.values()):
            counts = Counter(key for some in left.values() for key in {claim.key for claim in some})
            best = min(
                (claim for some in left.values() for claim in some),
                key=lambda claim: (-counts[claim.key], claim.rank, claim.doubt),
            )
            names = tuple(name for name, some in left.items() if any(claim.key == best.key for claim in some))
            known = best.cause if best.cause in CAUSES and not always and best.cause != "replicas-differ" else cause
            sentence = f"{thing} {_shortened(names)} {best.what}{_rivals(best, names, left)}; look at {best.where}{_ledger_line(self.evidence, names[0], best)}."
            found.append(Finding(known or best.cause, names, step, sentence, best.factor))
            left = {name: some for name, some in left.items() if name not in names}
        if left:
            found.append(self._unexplained(tuple(left), step, thing, cause, rows))
        return found

    def _unexplained(
        self, names: tuple[str, ...], step: int | None, thing: str, cause: str, rows: Sequence[Row]
    ) -> Finding:
        worst = max((row for row in rows if row.name in names), key=lambda row: row.error)
        sentence = (
            f"{thing} {_shortened(names)} differs by {worst.error:.3g} tolerances on ranks {short_ranks(worst.ranks)} and no "
            f"hypothesis fits; {_first_look(names, thing)}{_ledger_line(self.evidence, names[-1])}."
        )
        return Finding(cause or "unknown", names, step, sentence)

    def _unknown(self) -> Finding:
        row = self.wrong[0]
        sentence = f"the {row.quantity} {row.name} differs by {row.error:.3g} tolerances and no hypothesis fits."
        return Finding("unknown", (row.name,), row.step, sentence)


# --- Words of findings ---


def _shortened(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    if len(names) <= 3:
        return ", ".join(names)
    return f"{names[0]}, {names[1]} and {len(names) - 2} more"


def _simplest(some: Sequence[Claim]) -> Claim | None:
    """The simplest claim."""
    return min(some, key=lambda claim: (claim.rank, claim.doubt), default=None)


def _rivals(best: Claim, names: Sequence[str], left: Mapping[str, Sequence[Claim]]) -> str:
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


def _first_look(names: Sequence[str], thing: str) -> str:
    """Where to look when no hypothesis fits."""
    if "gradient" in thing:
        return f"look at {names[-1]} first, which the backward pass reaches before the others"
    return f"look at what writes {_shortened(names)}, and what ranks should tell each other for it"


def _ledger_line(evidence: Evidence, name: str, claim: Claim | None = None) -> str:
    """What the ledger plans for a parameter, over the modes of the claim."""
    info = evidence.parameters.get(name)
    if info is None or not info.ledger:
        has_one = info is not None and any(other.ledger for other in evidence.parameters.values())
        return " (ledger: no sum of it is planned)" if has_one else ""
    modes = claim.modes if claim is not None else ()
    line = next((line for line in info.ledger if any(mode in line for mode in modes)), info.ledger[0])
    return f" (ledger: {line})"


def _ledger_under(evidence: Evidence, module: str) -> str:
    """The ledger's line for the first parameter of a module."""
    inside = (name for name in evidence.parameters if name.startswith(f"{module}."))
    return next((text for name in inside if (text := _ledger_line(evidence, name))), "")

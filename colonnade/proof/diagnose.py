"""Diagnosis of a run that differs from the single-process reference: hypotheses are tested on the numbers, upstream first.

`diagnose` compares, and `_Diagnosis.findings` examines the differences in the order in which a step computes things. A
difference that follows from an earlier one is a row of the table, but not a finding. Each examination builds a case
(case.py), asks the hypotheses of its kind (claims.py), and turns the claims that explain most into findings (`_group`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isclose

from torch import Tensor

from colonnade.proof import hypotheses  # noqa: F401  importing the package fills the table
from colonnade.proof.case import Case, ClipCase, GradientCase, Groups, NormCase, digits, either, near, raw_scale
from colonnade.proof.claims import CAUSES, Claim, claims
from colonnade.proof.compare import (
    ACTIVATION,
    BUFFER,
    CLIPPED,
    GRADIENT,
    LOSS,
    MODE,
    NORM,
    NORMS,
    RANDOM,
    RECOMPUTED,
    UNCERTAIN,
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
    why_uncertain,
)
from colonnade.texts import pattern_of

_SURE = 80
"""Claims of this rank and above state that something differs, but hardly why."""
_TESTED_ELEMENTS = 20_000_000
"""Up to this many elements in total, every differing gradient is tested on its own."""


def diagnose(evidence: Evidence) -> Report:
    """Compare everything and name the mistakes. Differences that follow from an earlier one are only in the table."""
    rows = compare(evidence)
    wrong = [row for row in rows if not row.ok and row.status != UNCERTAIN]
    findings = _Diagnosis(evidence, rows).findings() if wrong else []
    return Report(tuple(findings), tuple(rows), tuple(evidence.notes), why_uncertain(evidence, rows))


class _Diagnosis:
    """The rows of one comparison, examined in the order in which a step computes them."""

    def __init__(self, evidence: Evidence, rows: Sequence[Row]) -> None:
        self.evidence, self.rows, self.groups = evidence, rows, Groups(evidence)
        self.wrong = [row for row in rows if not row.ok and row.status != UNCERTAIN]
        self.at = next((row.step for row in self.wrong if row.step is not None), 0)

    def findings(self) -> list[Finding]:
        """The mistakes of the first step that differs. Later steps start from its weights, so their differences follow."""
        # NaN spreads to everything that it is added to, so no other difference means anything.
        if broken := self._not_finite():
            return broken

        # The reference starts from the weights of the ranks. If those are not the weights of one model, all else differs too.
        rows = self.num_rows(WEIGHTS_AT_START)
        named = {row.name: claims("tensor", self._case(self.evidence.weights_at_start[row.name], row)) for row in rows}
        weights = {name: some for name, some in named.items() if name in self.evidence.parameters}
        buffers = {name: some for name, some in named.items() if name not in weights}
        start = self._group(weights, None, "the initial weight", "weights-differ-at-start", rows)
        start += self._group(buffers, None, "the initial buffer", "buffers-differ", rows, always=True)
        if start:
            return start

        # If ranks that should slice one batch sliced batches of their own, every activation is of other data.
        if self.evidence.sliced_differently:
            how = "were given different batches, and each sliced its own; give all of them the same full batch"
            return [
                Finding("replicas-differ", (), self.at, f"the ranks of {mode} {how}.")
                for mode in self.evidence.sliced_differently
            ]

        # The forward pass. Different masks make different activations, so masks come first. If the output of a module changes
        # when it is recomputed, either of the two outputs may be the right one: then only the recomputation is reported.
        again = self._recomputed()
        forward = self._masks() or ([] if again else self._forward())

        # Gradients follow from activations, so they are examined only if the activations are right.
        backward = forward or again or self._gradients()

        # A reported loss can be wrong without any effect on gradients, as a mean over the wrong ranks. But it can also be the
        # reason of gradients that no hypothesis explains; then the loss is the better thing to report.
        loss = [] if forward else self._loss(backward)
        known = [finding for finding in backward if finding.cause != "unknown"]
        found = [*known, *loss] if loss else [*backward]

        # Norm, clipped gradient and weight: each follows from the one before.
        if not backward:
            found += self._norm() or self._clipped() or self._weights()

        # Buffers (running statistics) follow from activations only.
        if not forward:
            rows = self.num_rows(BUFFER)
            named = {row.name: claims("tensor", self._case(self.step.buffers[row.name], row)) for row in rows}
            found += self._group(named, self.at, "the buffer", "buffers-differ", rows, always=True)
        if found:
            return found
        row = self.wrong[0]
        sentence = f"{_called(row)} differs by {row.error:.3g} tolerances, and no hypothesis explains it."
        return [Finding("unknown", (row.name,), row.step, sentence)]

    @property
    def step(self) -> StepEvidence:
        """The first step that differs."""
        return self.evidence.steps[self.at]

    def num_rows(self, *quantities: str) -> list[Row]:
        """The differing rows of some quantities, in that step."""
        return [row for row in self.wrong if row.quantity in quantities and row.step in (None, self.at)]

    def _ranks(self, ranks: Sequence[int]) -> str:
        """Ranks in a sentence."""
        if not ranks or len(ranks) == self.evidence.world_size:
            return "every rank"
        return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {short_ranks(ranks)}"

    # --- From NaN to the loss ---

    def _not_finite(self) -> list[Finding]:
        row = next((row for row in self.wrong if row.status == "not finite" and row.step in (None, self.at)), None)
        if row is None:
            return []
        if row.detail:
            sentence = (
                f"{_called(row)} is not finite in the single-process run either, so the model or the data is the cause, not "
                f"the parallelism."
            )
            return [Finding("not-finite", (row.name,), row.step, sentence)]

        # A reduction spreads NaN to every rank, so the ranks of the row say little: the local gradients tell where it came from.
        gradient = self.step.gradients.get(row.name) if row.quantity == GRADIENT else None
        sources = [
            (part.rank, number)
            for number, some in enumerate(gradient.raw if gradient is not None else ())
            for part in some
            if not bool(part.value.isfinite().all())
        ]
        if sources:
            rank, number = sources[0]
            source = f", and comes from rank {rank} in micro-batch {number}; look at the data of that rank there"
        elif gradient is not None and gradient.raw:
            source = (
                ", but the local gradients of all ranks are finite; look at its reduction and everything after that"
            )
        elif row.quantity in (NORM, NORMS):
            source = ", but all gradients are finite; look at the dtype of the sum of powers, and at divisions by zero"
        else:
            source = "; look at the data of these ranks"
        sentence = f"{_called(row)} is the first value that is not finite, on {self._ranks(row.ranks)}{source}."
        return [Finding("not-finite", (row.name,), row.step, sentence)]

    def _masks(self) -> list[Finding]:
        if in_eval := self.num_rows(MODE):
            names = tuple(row.name or "the model" for row in in_eval)
            verb, kind = ("are", "modules ") if len(names) > 1 else ("is", "" if names == ("the model",) else "module ")
            where = f"{verb} in evaluation mode on {self._ranks(in_eval[0].ranks)} and in training mode on the others"
            return [
                Finding(
                    "forward-differs",
                    names,
                    None,
                    f"{kind}{_shortened(names)} {where}; look for calls of eval() there.",
                )
            ]
        return [
            Finding(
                "masks-differ",
                (row.name,),
                None,
                f"{f'module {row.name}' if row.name else 'the model'} draws other random numbers on {self._ranks(row.ranks)} than on the first rank "
                f"that has the same activation (dropout, for example); look at the random seeds of these ranks.",
            )
            for row in self.num_rows(RANDOM)[:1]
        ]

    def _forward(self) -> list[Finding]:
        row = next(iter(self.num_rows(ACTIVATION)), None)
        if row is None:
            return []
        case, module = (
            self._case(self.step.activations[row.name], row),
            f"module {row.name}" if row.name else "the model",
        )
        rounded = claims("activation", case)
        best = _simplest([*claims("tensor", case), *rounded])

        # The output of the first module depends on nothing but the batch and its weights, and the weights are right.
        if best is not None and best not in rounded and row.name == next(iter(self.step.activations)):
            if best.cause == "replicas-differ":
                sentence = f"the output of the first module, {row.name}, {best.what}: ranks of one data rank were given different batches."
                return [Finding("replicas-differ", (row.name,), self.at, sentence)]
            if best.cause == "shards-swapped" and len(row.ranks) < len(self.step.activations[row.name].found):
                sentence = f"the output of the first module, {row.name}, {best.what}: some ranks were given the batch of another rank; look at the loader."
                return [Finding("micro-batch-twice", (row.name,), self.at, sentence)]

        # The ledger tells which reductions the parameters of the module have; the first parameter is representative.
        inside = (name for name in self.evidence.parameters if name.startswith(f"{row.name}."))
        ledger = next((text for name in inside if (text := _ledger_line(self.evidence, name))), "")
        how = f"its output {best.what}" if best else f"its output is off by {row.error:.3g} tolerances"
        where = f"that module, and {best.where}" if best else "that module"
        sentence = (
            f"{module} is the first whose output differs, on {self._ranks(row.ranks)}: {how}, while everything recorded "
            f"before it agrees; look at {where}{ledger}."
        )
        if best is not None and best in rounded:
            return [Finding("rounded", (row.name,), self.at, sentence)]
        return [Finding("forward-differs", (row.name,), self.at, sentence, best.factor if best else None)]

    def _recomputed(self) -> list[Finding]:
        """Modules whose output changes when they are recomputed in the backward pass, whichever output is right."""
        rows = self.num_rows(RECOMPUTED)
        if not rows:
            return []
        sentence = (
            f"{f'module {rows[0].name}' if rows[0].name else 'the model'} gives one output in the forward pass and another when it is recomputed in the "
            f"backward pass (activation checkpointing), on {self._ranks(rows[0].ranks)}; look for differences between the two: "
            f"random numbers, masks, buffers, routing or autocast."
        )
        return [Finding("recomputation-differs", tuple(row.name for row in rows), self.at, sentence)]

    def _loss(self, backward: Sequence[Finding]) -> list[Finding]:
        rows = self.num_rows(LOSS)
        if not rows or any(finding.cause != "unknown" for finding in backward):
            return []
        found = [value for value in self.step.found_loss if value is not None]
        how, factor = rows[0].detail, None
        if found and self.step.loss and all(isclose(value, found[0], rel_tol=1e-9) for value in found):
            factor = found[0] / self.step.loss
            sizes = {**self.groups.sizes, "accumulation": self.evidence.accumulation}
            products = near(factor, sizes, max(1e-9, 2 * rows[0].tolerance / abs(self.step.loss)))
            how += f", a factor of {digits(factor)}{either(products)}"
        elif found:
            how += ", and differs between ranks"
        seen = "all recorded activations agree" if self.step.activations else "no activation was recorded"
        sentence = (
            f"the loss is {how}, while {seen}; look at how the loss is averaged over micro-batches, tokens and ranks."
        )
        return [Finding("loss-differs", (), self.at, sentence, factor)]

    # --- Gradients ---

    def _gradients(self) -> list[Finding]:
        rows = self.num_rows(GRADIENT)
        if not rows:
            return []
        gradients = self.step.gradients
        wrong = {row.name for row in rows}
        healthy = frozenset({name for name, entry in gradients.items() if bool(entry.total.truth.any())} - wrong)
        scale = raw_scale(self.evidence, self.groups, self.step, wrong)

        # A large model has many layers of one kind, which share a mistake. Then the first and last of each kind are tested,
        # and the claims of one of them stand for the others.
        kinds: dict[str, list[Row]] = {}
        for row in rows:
            kinds.setdefault(self._kind(row.name), []).append(row)
        chosen = rows
        if sum(gradients[row.name].total.truth.numel() for row in rows) > _TESTED_ELEMENTS:
            chosen = [row for some in kinds.values() for row in (some if len(some) < 3 else [some[0], some[-1]])]

        def total(at: int, name: str) -> Compared | None:
            steps = self.evidence.steps
            return steps[at].gradients[name].total if 0 <= at < len(steps) and name in steps[at].gradients else None

        tested = {}
        for row in chosen:
            before = total(self.at - 1, row.name)
            case = GradientCase(
                evidence=self.evidence,
                groups=self.groups,
                compared=gradients[row.name].total,
                row=row,
                before=None if before is None else before.truth,
                name=row.name,
                gradient=gradients[row.name],
                step=self.step,
                at=self.at,
                later=total(self.at + 1, row.name),
                healthy=healthy,
                raw_scale=scale,
            )
            tested[row.name] = self._tested(case, "gradient")
        alike = {self._kind(name): some for name, some in tested.items()}
        named = {row.name: tested.get(row.name, alike.get(self._kind(row.name), [])) for row in rows}
        return self._group(named, self.at, "the gradient of", "", rows)

    def _tested(self, case: Case, *kinds: str) -> list[Claim]:
        """The claims that explain the whole tensor; if some of its elements are right, those that explain the others."""
        found = [claim for kind in kinds for claim in claims(kind, case)]
        if all(claim.rank >= _SURE for claim in found):
            elements = differing_elements(case.compared, case.row.tolerance)
            some = case.within(elements) if elements is not None else None
            inside = [] if some is None else [claim for kind in kinds for claim in claims(kind, some)]
            named = [replace(claim, what=f"(in some of its elements) {claim.what}") for claim in inside]
            found = [claim for claim in named if claim.rank < _SURE] or found or named
        return found

    def _kind(self, name: str) -> str:
        """The name without its numbers, and the placement."""
        info = self.evidence.parameters.get(name)
        return pattern_of(name, inside=True) + (f" {info.placement}" if info is not None else "")

    # --- Norm, clipping, weights ---

    def _norm(self) -> list[Finding]:
        row = next(iter(self.num_rows(NORM, NORMS)), None)
        if row is None:
            return []
        best = _simplest(claims("norm", NormCase(self.evidence, self.groups, self.step, self.at, row)))
        why = f": it {best.what}" if best else ", and no hypothesis explains it"
        where = best.where if best else "which elements count in the norm, how often, and over which ranks it is summed"
        sentence = f"{_called(row)} is {row.detail}, on {self._ranks(row.ranks)}{why}; look at {where}."
        return [Finding(best.cause if best else "unknown", (), self.at, sentence, best.factor if best else None)]

    def _clipped(self) -> list[Finding]:
        rows = self.num_rows(CLIPPED)
        if not rows:
            return []
        best = _simplest(claims("clipped", ClipCase(self.evidence, self.groups, self.step, self.at, tuple(rows))))
        names = tuple(row.name for row in rows)
        if best is None:
            sentence = (
                f"the clipped gradient of {_shortened(names)} is wrong, although the gradient and the norm are right; look at "
                f"the tensors that are multiplied by the clip coefficient."
            )
            return [Finding("unknown", names, self.at, sentence)]
        sentence = f"the clipped gradient of {_shortened(names)} {best.what}; look at {best.where}."
        return [Finding(best.cause, names, self.at, sentence, best.factor)]

    def _weights(self) -> list[Finding]:
        rows = self.num_rows(WEIGHTS)
        before = self.evidence.steps[self.at - 1].weights if self.at else self.evidence.weights_at_start
        named = {}
        for row in rows:
            old = before[row.name].truth if row.name in before else None
            named[row.name] = self._tested(self._case(self.step.weights[row.name], row, old), "tensor", "weights")
        return self._group(named, self.at, "the weight", "optimizer-differs", rows)

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
        """The smallest set of claims that explains all parameters, the claim that explains most of them first.

        `cause` replaces causes that are not in `CAUSES`; with `always`, all of them.
        """
        left = dict(named)
        ranks = {row.name: row.ranks for row in rows}
        found = []
        while left and any(left.values()):
            counts = Counter(key for some in left.values() for key in {claim.key for claim in some})
            best = min(
                (claim for some in left.values() for claim in some),
                key=lambda claim: (-counts[claim.key], claim.rank, claim.doubt),
            )
            names = tuple(name for name, some in left.items() if any(claim.key == best.key for claim in some))

            # Claims of the same rank on the same parameters are rivals: the numbers cannot tell them apart, so all are named.
            rivals = [
                claim
                for claim in left[names[0]]
                if (claim.rank, claim.doubt) == (best.rank, best.doubt)
                and all(any(other.key == claim.key for other in left[name]) for name in names)
            ]
            by_modes = {
                " and ".join(claim.modes): claim for claim in rivals if claim.cause == best.cause and claim.factor
            }
            same = [key for key, claim in by_modes.items() if claim.factor == best.factor and claim.modes != best.modes]
            others = {claim.cause: claim for claim in rivals if claim.cause != best.cause}
            what = best.what + (f" (or of {' or '.join(same)}: the numbers are the same)" if same else "")
            what += "".join(f", or {claim.cause} (it {claim.what})" for claim in others.values())

            known = best.cause if best.cause in CAUSES and not always and best.cause != "replicas-differ" else cause
            # Many claims name the ranks themselves.
            named_ranks = re.search(r"ranks? \[?\d|(every|each|this) rank", best.what)
            where = "" if named_ranks else f" on {self._ranks(ranks[names[0]])}"
            sentence = f"{thing} {_shortened(names)}{where} {what}; look at {best.where}{_ledger_line(self.evidence, names[0], best)}."
            found.append(Finding(known or best.cause, names, step, sentence, best.factor))
            left = {name: some for name, some in left.items() if name not in names}
        if left:
            # Without an explanation, the place to start is the last of the gradients: backward reaches its parameter first.
            names = tuple(left)
            worst = max((row for row in rows if row.name in left), key=lambda row: row.error)
            look = f"the code that writes {_shortened(names)}, and the collectives that it needs"
            if "gradient" in thing:
                look = f"{names[-1]} first, which the backward pass reaches before the others"
            sentence = (
                f"{thing} {_shortened(names)} differs by up to {worst.error:.3g} tolerances on {self._ranks(worst.ranks)}, and no "
                f"hypothesis explains it; look at {look}{_ledger_line(self.evidence, names[-1])}."
            )
            found.append(Finding(cause or "unknown", names, step, sentence))
        return found


# --- Words of findings ---


def _called(row: Row) -> str:
    """A compared value as the subject of a sentence."""
    if row.quantity == row.name:  # the loss, and the norm of all gradients
        return f"the {row.name}"
    if row.quantity in (ACTIVATION, RECOMPUTED) and not row.name:
        return "the output of the model"
    singular = {WEIGHTS: "weight", WEIGHTS_AT_START: "initial weight", NORMS: "norm of", GRADIENT: "gradient of"}
    singular |= {ACTIVATION: "output of", RECOMPUTED: "recomputed output of", CLIPPED: "clipped gradient of"}
    return f"the {singular.get(row.quantity, row.quantity)} {row.name}"


def _shortened(names: Sequence[str]) -> str:
    """The first names, and the number of the others."""
    if len(names) <= 3:
        return ", ".join(names)
    return f"{names[0]}, {names[1]} and {len(names) - 2} more"


def _simplest(some: Sequence[Claim]) -> Claim | None:
    return min(some, key=lambda claim: (claim.rank, claim.doubt), default=None)


def _ledger_line(evidence: Evidence, name: str, claim: Claim | None = None) -> str:
    """The reduction that the ledger plans for a parameter, over the modes of the claim."""
    info = evidence.parameters.get(name)
    if info is None or not info.ledger:
        has_one = info is not None and any(other.ledger for other in evidence.parameters.values())
        return " (ledger: no reduction is planned for it)" if has_one else ""
    modes = claim.modes if claim is not None else ()
    line = next((line for line in info.ledger if any(mode in line for mode in modes)), info.ledger[0])
    return f" (ledger: {line})"
